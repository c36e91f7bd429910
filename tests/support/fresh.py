"""Scripts in processes of their own that need not import Numba: children of one process that has.

Importing Numba and compiling a first function takes more than a second, before a script does anything. On Linux a
process does that once for all scripts, and forks for each; it never runs any of our own code.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

PATHS = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
START = """
import gc, numba, sdpa_ref, thread_work
numba.njit(lambda x: x + 1).compile((numba.int64,))  # loads what a compiler needs
from fresh import job
gc.collect(), gc.freeze()  # or each child would copy all that memory in order to release it at its end
exec(compile(job({}), "<string>", "exec"))
"""


def start(script, environment, cwd=None, imported=True):
    """Start a process that runs a script; `communicate` returns what it prints, when it has ended.

    Numba is `imported` before, or by the script: with its settings, and after what the script does first.
    """
    if imported and sys.platform == "linux":
        return Child(script, environment, cwd)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


@cache
def server():
    """Return the connection to the process that forks."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", START.format(there.fileno())]
    environment = os.environ | {"PYTHONPATH": PATHS}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    there.close()

    def stop():
        here.close()
        process.wait()

    atexit.register(stop)
    return here


class Child:
    """A process that is forked, with as much of `subprocess.Popen` as the tests use."""

    def __init__(self, script, environment, cwd=None):
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        task = json.dumps({"script": script, "environment": dict(environment), "cwd": str(cwd or os.getcwd())})
        socket.send_fds(server(), [task.encode()], [end for _, end in pipes])
        self.pid = int(server().recv(20))
        self.outputs = [open(end, encoding="utf-8") for end, _ in pipes]
        for _, end in pipes:
            os.close(end)

    def communicate(self, timeout=600):
        """Return what it writes to stdout and stderr until it ends."""
        late = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
        late.start()
        with ThreadPoolExecutor(2) as readers:
            texts = tuple(readers.map(lambda output: output.read(), self.outputs))
        server().send(str(self.pid).encode())
        self.returncode = int(server().recv(20))
        late.cancel()
        for output in self.outputs:
            output.close()
        return texts


def job(connection):
    """Fork for each script that comes, and return the script in the child."""
    tasks = socket.socket(fileno=connection)
    while True:
        task, outputs, _, _ = socket.recv_fds(tasks, 2**20, 2)
        if not task:
            os._exit(0)
        if not outputs:
            tasks.send(str(os.waitstatus_to_exitcode(os.waitpid(int(task), 0)[1])).encode())
            continue
        child = os.fork()
        if not child:
            break
        tasks.send(str(child).encode())
        for output in outputs:
            os.close(output)
    tasks.close()
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    task = json.loads(task)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    return task["script"]
