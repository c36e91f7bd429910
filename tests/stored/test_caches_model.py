"""Random sequences of everything that a cache can do, against lists of tokens that are attended densely."""

import numpy as np
import pytest
import token_lists
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from token_lists import STORES, Kind, Rows

import sdpa_ref as sr

MOST = 5  # rows
kinds = st.fixed_dictionaries({
    "storage": st.sampled_from(list(STORES)),
    "page": st.sampled_from([None, None, 1, 3, 4]),
    "layout": st.sampled_from(["HLE", "LHE"]),
    "tied": st.booleans(),
}, optional={
    "window": st.integers(1, 6), "first": st.integers(0, 4), "slack": st.integers(0, 4),
})  # fmt: skip


class Caches(RuleBasedStateMachine):
    backend = "reference"

    @initialize(kind=kinds, batch=st.sampled_from([2, 1, 3, 0]), seed=st.integers(0, 2**32))
    def begin(self, kind, batch, seed):
        if "window" not in kind:
            kind = {name: value for name, value in kind.items() if name not in ("first", "slack")}
        self.kind, self.rng = Kind(**kind), np.random.default_rng(seed)
        self.cache, self.rows = self.kind.make(batch), Rows(self.kind, batch)
        self.kind.caches = [self.cache]

    def added(self, batch, T, data, ragged):
        keys, values = self.kind.tokens(self.rng, batch, T)
        lengths = [data.draw(st.integers(0, T)) for _ in range(batch)] if ragged else [T] * batch
        for b, t in enumerate(lengths):
            for tokens in (keys, values) if values is not None else (keys,):
                tokens[b, t:] = np.nan
        return keys, values, lengths

    @rule(T=st.integers(0, 7), ragged=st.booleans(), data=st.data())
    def append(self, T, ragged, data):
        keys, values, lengths = self.added(len(self.rows.keys), T, data, ragged)
        turned = self.kind.turned(keys), self.kind.turned(values)
        self.cache.append(*turned, lengths if ragged else None)
        self.rows.append(keys, values, lengths)
        for given in turned:
            if given is not None:
                given[...] = np.nan  # it was copied

    @rule(steps=st.integers(1, 20))
    def decode(self, steps):
        for _ in range(steps):
            keys, values = self.kind.tokens(self.rng, len(self.rows.keys), 1)
            self.cache.append(self.kind.turned(keys), self.kind.turned(values))
            self.rows.append(keys, values, [1] * len(self.rows.keys))

    @rule(data=st.data())
    def attend(self, data):
        reach = self.rows.reach()
        L = data.draw(st.integers(0, max(min(reach, 4), 0)))
        if reach >= 0:
            self.rows.check_attention(self.cache, self.rng, L, self.backend)

    @rule(data=st.data())
    def attend_ragged(self, data):
        B = len(self.rows.keys)
        most = [min(3, n - self.rows.least(b)) for b, n in enumerate(self.rows.lengths)]
        lengths = [data.draw(st.integers(0, max(m, 0))) for m in most]
        self.rows.check_attention(self.cache, self.rng, 3, self.backend, np.array(lengths, int).reshape(B))

    @rule(data=st.data())
    def crop(self, data):
        most = data.draw(st.sampled_from([1, 4, 4, 100]))  # what is taken back
        wanted = [n - data.draw(st.integers(0, min(n, most))) for n in self.rows.lengths]
        if all(self.rows.can_crop(b, n) for b, n in enumerate(wanted)):
            self.cache.crop(np.array(wanted, int))
            self.rows.crop(wanted)
        else:
            with pytest.raises(ValueError, match="the smallest length is"):
                self.cache.crop(wanted)

    @rule(data=st.data())
    def accept(self, data):
        of = [data.draw(st.integers(0, min(n - self.rows.least(b), 5))) for b, n in enumerate(self.rows.lengths)]
        kept = [sorted(data.draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=n))) for n in of]
        if any(self.rows.least(b) > n - o for b, (n, o) in enumerate(zip(self.rows.lengths, of, strict=True))):
            return
        index = np.full((len(of), 5), -1)
        for b, row in enumerate(kept):
            index[b, : len(row)] = row
        self.cache.accept(index, of)
        self.rows.accept(kept, of)

    @rule(data=st.data())
    def select(self, data):
        rows = st.integers(-1, len(self.rows.keys) - 1)
        index = data.draw(st.lists(rows, min_size=len(self.rows.keys) // 2, max_size=MOST))
        self.cache.select(index)
        self.rows.select(index)

    @precondition(lambda self: len(self.rows.keys) < MOST)
    @rule(T=st.integers(0, 5), ragged=st.booleans(), data=st.data())
    def join(self, T, ragged, data):
        other, rows = self.kind.make(1), Rows(self.kind, 1)
        for _ in range(2):
            keys, values, lengths = self.added(1, T, data, ragged)
            other.append(self.kind.turned(keys), self.kind.turned(values), lengths)
            rows.append(keys, values, lengths)
        self.cache.join(other)
        self.rows.join(rows)
        if data.draw(st.booleans()):  # they share pages, and each goes its own way
            other.append(*map(self.kind.turned, self.kind.tokens(self.rng, 1, 2)))
            self.rows.check_tokens(self.cache)

    @precondition(lambda self: len(self.rows.keys) < MOST // 2)
    @rule()
    def join_itself(self):
        self.cache.join(self.cache)
        self.rows.join(self.rows)

    @rule()
    def save_and_load(self):
        entries = self.cache.state_dict()
        twin = self.kind.pool.from_state_dict(entries) if self.kind.pool else sr.KVCache.from_state_dict(entries)
        self.rows.check_tokens(twin)
        if self.kind.pool:
            self.cache.close()
        self.cache = twin
        self.kind.caches = [self.cache]

    @rule()
    def poison(self):
        token_lists.poison(self.cache, self.kind)

    def teardown(self):
        if not hasattr(self, "rows"):
            return
        self.rows.check_tokens(self.cache)
        if self.kind.pool:
            self.cache.close()
            assert self.kind.pool.free == self.kind.pool.pages
            assert not self.kind.pool._references.any()
            assert not self.kind.pool._counted


class CachesOnNumba(Caches):
    backend = "numba"


TestCaches = Caches.TestCase
TestCachesOnNumba = CachesOnNumba.TestCase
MANY = settings.default.max_examples
TestCaches.settings = settings(max_examples=2 * MANY, stateful_step_count=25, deadline=None)
TestCachesOnNumba.settings = settings(max_examples=MANY, stateful_step_count=25, deadline=None)
