"""Races in shared memory: which thread wrote and which read each piece, and whether a barrier lies between."""

import numpy as np

from .faults import Array, check

IN_FLIGHT = np.iinfo(np.int32).max  # the time of a copy that was not waited for
NOBODY = np.iinfo(np.int16).max


class Races:
    """The last write and the reads since, of each `piece` bytes of shared memory.

    An access comes after an earlier one if the same thread made both, if the block met at a barrier between them, or
    if both are of one warp that met at a `bar.warp.sync`. A copy in flight comes before nothing.

    Attributes
    ----------
    now : int
        The time, which the instructions advance.
    since_block, since_warp : int32 arrays, one number a lane
        When the lane's block, and its warp, last met.
    """

    def __init__(self, size: int, piece: int, thread: Array) -> None:
        pieces = size // piece
        self.now = 0
        self.since_block, self.since_warp = np.zeros((2, len(thread)), np.int32)
        self._piece = piece
        self._thread = thread.astype(np.int16)
        self._writer, self._written = np.full(pieces, NOBODY, np.int16), np.full(pieces, -1, np.int32)
        self._first, self._last = (
            np.full(pieces, NOBODY, np.int16),
            np.full(pieces, -1, np.int16),
        )  # of the threads that read
        self._read = np.full(pieces, -1, np.int32)
        self._log: list[tuple[int, Array, Array]] = []  # reads that are not yet in these

    def read(self, lanes: Array, place: Array, size: int) -> None:
        """Raise a fault for a race with a write; remember these reads."""
        pieces = self._pieces(place, size)
        self._after_writes(lanes, pieces, "read")
        self._log.append((self.now, lanes, pieces))

    def write(self, lanes: Array, place: Array, size: int, *, landed: bool = True) -> None:
        """Raise a fault for a race with a write or a read; remember these writes."""
        pieces = self._pieces(place, size)
        self._after_writes(lanes, pieces, "written")
        self._after_reads(lanes, pieces)
        me = self._thread[lanes][:, None]
        self._writer[pieces] = me
        self._written[pieces] = self.now if landed else IN_FLIGHT
        self._check(self._writer[pieces] != me, lanes, "written by two threads at once")

    def land(self, place: Array, size: int) -> None:
        """Turn copies in flight into writes of now."""
        self._written[self._pieces(place, size)] = self.now

    def _pieces(self, place: Array, size: int) -> Array:
        return place[:, None] // self._piece + np.arange(size // self._piece)

    def _after_writes(self, lanes: Array, pieces: Array, verb: str) -> None:
        written = self._written[pieces]
        early = written >= self.since_block[lanes][:, None]
        if not early.any():
            return
        self._check(written == IN_FLIGHT, lanes, f"{verb} before a copy to it is waited for")
        writer, me = self._writer[pieces], self._thread[lanes][:, None]
        met = (writer // 32 == me // 32) & (written < self.since_warp[lanes][:, None])
        self._check(early & (writer != me) & ~met, lanes, f"{verb} after another thread's write, no barrier between")

    def _after_reads(self, lanes: Array, pieces: Array) -> None:
        self._take_log()
        read = self._read[pieces]
        early = read >= self.since_block[lanes][:, None]
        if not early.any():
            return
        first, last, me = self._first[pieces], self._last[pieces], self._thread[lanes][:, None]
        alone = (first == me) & (last == me)
        met = (first // 32 == me // 32) & (last // 32 == me // 32) & (read < self.since_warp[lanes][:, None])
        self._check(early & ~alone & ~met, lanes, "written after another thread's read, no barrier between")

    def _take_log(self) -> None:
        """Put the logged reads that a barrier has not settled into the arrays."""
        oldest = self.since_block.min()
        for when, lanes, pieces in self._log:
            if when >= oldest:
                each, fresh = np.broadcast_to(lanes[:, None], pieces.shape), when >= self.since_block[lanes]
                each, some = each[fresh], pieces[fresh]
                me, stale = self._thread[each], self._read[some] < self.since_block[each]
                first = np.where(stale, me, np.minimum(self._first[some], me)).ravel()
                last = np.where(stale, me, np.maximum(self._last[some], me)).ravel()
                some = some.ravel()  # lanes ascend, and of several in one place the last one assigned stays
                self._first[some[::-1]], self._last[some], self._read[some] = first[::-1], last, when
        self._log.clear()

    def _check(self, wrong: Array, lanes: Array, what: str) -> None:
        check(wrong.any(1), f"race: shared memory {what}", lanes)
