# SPDX-License-Identifier: Apache-2.0
"""What the user gave to be called: one that hangs is given up, whatever it raises is an error like any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class HangsError(RuntimeError):
    """A callable has not returned within its limit; or it had not before, and still runs."""


class EndsError(RuntimeError):
    """A callable raised what would have ended its thread without a word: SystemExit, say."""


class Given:
    """Calls what the user gave, each time on a thread of its own, and waits no longer than a limit.

    Example:
        >>> Given(limit=10).call("policy", lambda: "sick")
        'sick'
    """

    def __init__(self, limit: float) -> None:
        """``limit`` in seconds."""
        self._limit = limit
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked child: its parent's threads do not run here."""
        self._given_up: dict[str, threading.Thread] = {}

    def hangs(self, name: str) -> bool:
        """Whether the one of that name was given up and runs still."""
        call = self._given_up.get(name)
        return call is not None and call.is_alive()

    def call(self, name: str, act: Callable[[], _T], late: Callable[[_T], object] | None = None) -> _T:
        """What ``act`` returns. ``late`` takes what it returns after it was given up.

        Raises:
            HangsError: it does not return, or the call before has not: it is not called again meanwhile.
            EndsError: it raised what is no ``Exception``.
            Exception: whatever it raised.
        """
        if self.hangs(name):
            raise HangsError(f"{name}: the call before has not returned")
        call = _Call(name, act, late)
        call.start()
        if not call.ended(self._limit):
            self._given_up[name] = call
            raise HangsError(f"{name} has not returned within {self._limit:g} s")
        return call.result()


class _Call(threading.Thread, Generic[_T]):
    def __init__(self, name: str, act: Callable[[], _T], late: Callable[[_T], object] | None) -> None:
        super().__init__(name=f"torchmem-{name}", daemon=True)
        self._act, self._late = act, late
        self._over = threading.Event()
        self._handing = threading.Lock()
        self._given_up = False
        self._returned: list[_T] = []
        self._raised: BaseException | None = None

    def run(self) -> None:
        try:
            self._returned.append(self._act())
        except BaseException as error:  # this thread is its alone
            self._raised = error
        with self._handing:
            given_up = self._given_up
            self._over.set()
        if given_up and self._returned and self._late is not None:
            self._late(self._returned[0])

    def ended(self, limit: float) -> bool:
        """Whether it has within the limit; if not it is given up, and what it returns goes to ``late``."""
        if self._over.wait(limit):
            return True
        with self._handing:
            self._given_up = not self._over.is_set()
        return not self._given_up

    def result(self) -> _T:
        if self._raised is None:
            return self._returned[0]
        if isinstance(self._raised, Exception):
            raise self._raised
        raise EndsError(f"{self.name.removeprefix('torchmem-')} raised {self._raised!r}") from self._raised
