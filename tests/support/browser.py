"""A browser without a window, driven by its DevTools protocol over two pipes: no other package is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

_AS_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, at in zip(high, (3, 4)):
    os.dup2(number, at)
os.execv(sys.argv[3], sys.argv[3:])
"""  # where a browser expects its pipes
_PATIENCE = 120  # looks of a second each, so that a pause of the whole machine is none of the browser
NAMES = "chromium", "chromium-browser", "google-chrome"


class Tab:
    """The one page of a browser."""

    def __init__(self, to_browser, from_browser):
        self.to_browser, self.from_browser, self.unread = to_browser, from_browser, b""
        self.count, self.session, self.errors, self.requests = 0, {}, [], []
        (target, *_) = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Return the browser's answer to a command."""
        self.count += 1
        message = json.dumps({"id": self.count, "method": method, "params": params, **self.session})
        os.write(self.to_browser, message.encode() + b"\0")
        while (told := self._read()).get("id") != self.count:
            pass
        assert "error" not in told, told
        return told["result"]

    def _read(self):
        """Return the next message, and keep what it says about errors and requests."""
        while b"\0" not in self.unread:
            said = any(select.select([self.from_browser], [], [], 1)[0] for _ in range(_PATIENCE))
            assert said, "the browser says nothing"
            self.unread += os.read(self.from_browser, 1 << 16) or pytest.fail("the browser has ended")
        text, _, self.unread = self.unread.partition(b"\0")
        told = json.loads(text)
        if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(told["params"])
        if told.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["params"]["request"]["url"])
        return told

    def open(self, path, width=1280, height=900, scheme="light", touch=False, hash=""):
        """Open a file at a size of the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url="about:blank")  # another hash of the same page would load nothing
        self.errors.clear(), self.requests.clear()
        self.send("Page.navigate", url=path.as_uri() + hash)
        while self.run("document.readyState") != "complete":
            pass

    def run(self, script):
        """Return the value of a JavaScript expression."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def press(self, *keys):
        """Press keys, by their names in JavaScript."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def point(self, x, y):
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def touch(self, x, y):
        """Tap."""
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, path):
        """Write what is seen as a PNG file."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile):
    """Give a tab, or skip with the reason."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no browser is installed: apt install chromium")
    if os.name != "posix":
        pytest.skip("pipes to a browser need POSIX")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "about:blank"
    command = [
        sys.executable, "-c", _AS_3_AND_4, str(theirs_in), str(theirs_out), program, *options,
        "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in), os.close(theirs_out)
    try:
        tab = Tab(ours_out, ours_in)
        yield tab
        with suppress(OSError, AssertionError):
            tab.session = {}
            tab.send("Browser.close")
    finally:
        os.close(ours_out), os.close(ours_in)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
