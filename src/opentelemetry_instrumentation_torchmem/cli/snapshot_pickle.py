# SPDX-License-Identifier: Apache-2.0
"""Plain data out of a pickle that nobody has to trust.

A snapshot's pickle holds dicts, lists, tuples, strings, numbers, booleans and None, and nothing else. So the
few operations that build these are read here and every other one is refused by its name: there is no class
to look up, no function to call, and no size that is believed before the bytes are there. (The C unpickler
takes 2 GiB for nine bytes with a huge memo index; `find_class` alone does not help against that.)
"""

from __future__ import annotations

import gc
import pickle
import pickletools
import struct
from collections.abc import Callable, Sequence
from typing import cast

NEWEST_PROTOCOL = 5

_LOOK_EVERY = 16_384
"""Bytes after which it is looked whether there is room left: what is small is accounted for without."""
# What CPython 3.10 and later take for each, with what the memory's own allocator adds: no less than that.
_LIST_COST, _DICT_COST, _TUPLE_COST, _TEXT_COST, _NUMBER_COST = 112, 80, 64, 64, 32
_MARK_COST = 128
_ITEM_COST = 10  # of a list, one eighth of which may be spare; of the memo; of the values that wait
_LONG = 32  # a signed 64-bit integer takes 9 bytes; one of more than 32 is no address and no size
_RUN = 2000
"""Bytes of references that are read at once."""


class PlainDataError(ValueError):
    """The pickle holds something else than plain data, is broken or too much; the message says what."""


class TooMuchError(PlainDataError):
    """What the pickle holds takes more memory than was allowed."""


def load(data: bytes, max_memory: int, progress: Callable[[float], None] | None = None) -> object:
    """What the pickle holds. The same container may be in it many times, and in itself: never walk it freely.

    Args:
        data: the whole pickle, protocol 2 or later.
        max_memory: bytes that what is built may take, and that building it may take meanwhile.
        progress: is told now and then which share of the pickle is read.

    Raises:
        PlainDataError: anything but plain data in it, or more of that than ``max_memory``.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing of it is garbage yet, and to look for some takes a fifth of the time
    try:
        return _Machine(data, max_memory, progress).run()
    finally:
        if collecting:
            gc.enable()


def _table_cost(entries: int) -> int:
    """A dict's table: a power of two of places, two thirds of them for entries."""
    return 40 + (20 << max(3, ((3 * entries - 1) // 2).bit_length())) if entries else 0


class _Machine:
    """The pickle machine, with the operations of plain data only."""

    __slots__ = (
        "_at",
        "_below",
        "_data",
        "_memo",
        "_outer",
        "_progress",
        "_room",
        "_room_at_first",
        "_stack",
    )

    def __init__(self, data: bytes, max_memory: int, progress: Callable[[float], None] | None = None) -> None:
        self._data = data
        self._at = 0
        self._progress = progress
        self._stack: list[object] = []
        self._outer: list[list[object]] = []  # the stacks below the marks
        self._below = 0  # the values on them
        self._memo: list[object] = []
        self._room = self._room_at_first = max_memory

    def run(self) -> object:
        data, handlers = self._data, _HANDLERS
        if data[:1] != pickle.PROTO:
            raise PlainDataError("it is not a pickle of protocol 2 or later")
        began, self._at = 0, 1
        try:
            self.proto()
            upto = 0
            while True:
                began = self._at
                if began >= upto:
                    self._look_around()
                    upto = began + _LOOK_EVERY
                code = data[began]
                self._at = began + 1
                if code == _STOP:
                    self._look_around()
                    return self._end()
                handlers[code](self)
        except KeyError:  # of the handlers; no other look-up by key is made
            raise self._refusal(began) from None
        except (IndexError, struct.error):
            if self._at >= len(data):
                raise PlainDataError(f"it is cut off: the file ends at byte {len(data):,}") from None
            raise PlainDataError(f"it is broken at byte {began:,}") from None
        except UnicodeDecodeError:
            raise PlainDataError(f"it is broken at byte {began:,}: a string that is not UTF-8") from None

    def _look_around(self) -> None:
        self._take(0, beside=self._below + len(self._stack))
        if self._progress is not None:
            self._progress(self._at / len(self._data))

    def _end(self) -> object:
        if len(self._stack) != 1 or self._outer:
            raise PlainDataError("it is broken: it ends in the middle of a list or dict")
        if self._at != len(self._data):
            raise PlainDataError(f"{len(self._data) - self._at:,} bytes follow the end of the pickle")
        return self._stack[0]

    def _refusal(self, at: int) -> PlainDataError:
        code = self._data[at]
        name = _NAMES.get(code)
        if name is None:
            return PlainDataError(f"it is broken at byte {at:,}: {code:#04x} is no pickle operation")
        what = name
        if code == pickle.GLOBAL[0] or code == pickle.INST[0]:
            words = self._data[at + 1 : at + 400].split(b"\n", 2)
            if len(words) == 3:
                what += " " + printable(".".join(word.decode("utf-8", "replace") for word in words[:2]))
        elif code == pickle.STACK_GLOBAL[0] and len(self._stack) >= 2:
            words = self._stack[-2:]
            what += " " + printable(".".join(word for word in words if isinstance(word, str)))
        return PlainDataError(
            f"refused at byte {at:,}: {what}; a snapshot holds dicts, lists, tuples, strings and numbers only"
        )

    def _take(self, cost: int, beside: int = 0) -> None:
        """Accounts for so many bytes, while so many values wait to be put somewhere."""
        self._room -= cost
        if self._room < _ITEM_COST * beside:
            raise TooMuchError(f"what it holds takes more than {self._room_at_first >> 20:,} MiB of memory")

    def _bytes(self, count: int) -> bytes:
        begin = self._at
        end = begin + count
        if end > len(self._data):
            self._at = len(self._data)
            raise IndexError
        self._at = end
        return self._data[begin:end]

    def _number(self, count: int) -> int:
        return int.from_bytes(self._bytes(count), "little")

    # Framing

    def proto(self) -> None:
        version = self._number(1)
        if not 2 <= version <= NEWEST_PROTOCOL:
            raise PlainDataError(f"pickle protocol {version}; 2 to {NEWEST_PROTOCOL} are read")

    def frame(self) -> None:
        self._bytes(8)  # how much to read at once, for readers of streams

    # Scalars

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int1(self) -> None:
        self._stack.append(self._data[self._at])
        self._at += 1

    def int2(self) -> None:
        data, at = self._data, self._at
        self._at = at + 2
        self._room -= _NUMBER_COST
        self._stack.append(data[at] | data[at + 1] << 8)

    def int4(self) -> None:
        self._room -= _NUMBER_COST
        self._stack.append(int.from_bytes(self._bytes(4), "little", signed=True))

    def long1(self) -> None:
        count = self._number(1)
        if count > _LONG:
            raise PlainDataError(f"an integer of {count} bytes at byte {self._at:,}")
        self._room -= _NUMBER_COST + 8 + count
        self._stack.append(int.from_bytes(self._bytes(count), "little", signed=True))

    def float8(self) -> None:
        self._room -= _NUMBER_COST
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def text1(self) -> None:
        self._text(self._number(1))

    def text4(self) -> None:
        self._text(self._number(4))

    def text8(self) -> None:
        self._text(self._number(8))

    def _text(self, count: int) -> None:
        if count > len(self._data) - self._at:
            self._at = len(self._data)
            raise IndexError
        self._take(_TEXT_COST + 2 * count)  # what is read, and the text
        raw = self._bytes(count)
        if not raw.isascii():  # up to four bytes a letter, beside what there was before the first wide one
            self._take(5 * count)
            self._room += 2 * count
        self._stack.append(raw.decode("utf-8", "surrogatepass"))
        self._room += count

    # Containers

    def mark(self) -> None:
        self._room -= _MARK_COST
        self._below += len(self._stack)
        self._outer.append(self._stack)
        self._stack = []

    def _marked(self) -> list[object]:
        items = self._stack
        self._stack = self._outer.pop()
        self._below -= len(self._stack)
        if items:  # else it stays in the account: what costs nothing may be there very often
            self._room += _MARK_COST
        return items

    def _take_for(self, items: Sequence[object], cost: int) -> None:
        """Accounts for what is made of items that are still on a stack."""
        self._take(cost, beside=self._below + len(self._stack) + 2 * len(items))

    def empty_list(self) -> None:
        self._room -= _LIST_COST
        self._stack.append([])

    def empty_dict(self) -> None:
        self._room -= _DICT_COST
        self._stack.append({})

    def empty_tuple(self) -> None:
        self._stack.append(())

    def append(self) -> None:
        item = self._stack.pop()
        whole = self._stack[-1]
        if type(whole) is not list:
            raise IndexError
        self._room -= _ITEM_COST
        whole.append(item)  # pyright: ignore[reportUnknownMemberType]

    def appends(self) -> None:
        items = self._marked()
        whole = self._stack[-1]
        if type(whole) is not list:
            raise IndexError
        self._take_for(items, _ITEM_COST * len(items))
        whole.extend(items)  # pyright: ignore[reportUnknownMemberType]

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        whole = self._dict()
        self._check_key(key)
        if key in whole:
            raise self._twice()
        self._grow(whole, [key, value])
        whole[key] = value

    def set_items(self) -> None:
        self._update(self._marked())

    def _dict(self) -> dict[object, object]:
        whole = self._stack[-1]
        if type(whole) is not dict:
            raise IndexError
        return cast("dict[object, object]", whole)

    def _check_key(self, key: object) -> None:
        # Numbers can be chosen to collide, and nested tuples to overflow C's stack.
        if type(key) is not str:
            raise PlainDataError(
                f"a dict at byte {self._at:,} has a key of type {type(key).__name__}, not str"
            )

    def _grow(self, whole: dict[object, object], items: list[object]) -> None:
        before = len(whole)
        self._take_for(items, _table_cost(before + len(items) // 2))  # both tables are there while it grows
        self._room += _table_cost(before)

    def _update(self, items: list[object]) -> None:
        whole = self._dict()
        if len(items) % 2:
            raise IndexError
        most = len(whole) + len(items) // 2
        self._grow(whole, items)
        keys = items[::2]
        for key in keys:
            if type(key) is not str:
                self._check_key(key)
        whole.update(zip(keys, items[1::2], strict=True))
        if len(whole) != most:
            raise self._twice()

    def _twice(self) -> PlainDataError:
        # No pickler does it, and it takes no memory: it could go on for as long as the file.
        return PlainDataError(f"it is broken: a dict at byte {self._at:,} has a key twice")

    def list_of(self) -> None:
        items = self._marked()
        self._take(_LIST_COST + _ITEM_COST * len(items))
        self._stack.append(items)

    def dict_of(self) -> None:
        items = self._marked()
        self.empty_dict()
        self._update(items)

    def tuple_of(self) -> None:
        items = self._marked()
        self._take_for(items, _TUPLE_COST + _ITEM_COST * len(items))
        self._stack.append(tuple(items))

    def tuple1(self) -> None:
        self._small_tuple(1)

    def tuple2(self) -> None:
        self._small_tuple(2)

    def tuple3(self) -> None:
        self._small_tuple(3)

    def _small_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._room -= _TUPLE_COST + _ITEM_COST * count
        self._stack[-count:] = [tuple(self._stack[-count:])]

    # The memo: picklers number what they put into it from 0 on

    def memoize(self) -> None:
        self._room -= _ITEM_COST
        self._memo.append(self._stack[-1])

    def put1(self) -> None:
        self._remember(self._number(1))

    def put4(self) -> None:
        self._remember(self._number(4))

    def _remember(self, index: int) -> None:
        if index != len(self._memo):
            raise PlainDataError(f"it is broken at byte {self._at:,}: what it remembers is not counted up")
        self.memoize()

    def get(self) -> None:
        # They come in long runs, as the frames of a stack do: those without a call for each.
        data, memo, push = self._data, self._memo, self._stack.append
        at = self._at - 1
        until = at + _RUN
        code = data[at]
        try:
            while at < until:
                code = data[at]
                if code == _GET1:
                    push(memo[data[at + 1]])
                    at += 2
                elif code == _GET4:
                    push(memo[_UINT4(data, at + 1)[0]])
                    at += 5
                else:
                    break
        except (IndexError, struct.error):
            if at + (5 if code == _GET4 else 2) <= len(data):
                raise PlainDataError(
                    f"it is broken at byte {at:,}: it refers to a value that is not there"
                ) from None
            self._at = len(data)
            raise
        self._at = at


_STOP, _GET1, _GET4 = pickle.STOP[0], pickle.BINGET[0], pickle.LONG_BINGET[0]
_UINT4 = struct.Struct("<I").unpack_from
_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    code[0]: handler
    for code, handler in (
        (pickle.FRAME, _Machine.frame),
        (pickle.NONE, _Machine.none),
        (pickle.NEWTRUE, _Machine.true),
        (pickle.NEWFALSE, _Machine.false),
        (pickle.BININT1, _Machine.int1),
        (pickle.BININT2, _Machine.int2),
        (pickle.BININT, _Machine.int4),
        (pickle.LONG1, _Machine.long1),
        (pickle.BINFLOAT, _Machine.float8),
        (pickle.SHORT_BINUNICODE, _Machine.text1),
        (pickle.BINUNICODE, _Machine.text4),
        (pickle.BINUNICODE8, _Machine.text8),
        (pickle.MARK, _Machine.mark),
        (pickle.EMPTY_LIST, _Machine.empty_list),
        (pickle.EMPTY_DICT, _Machine.empty_dict),
        (pickle.EMPTY_TUPLE, _Machine.empty_tuple),
        (pickle.APPEND, _Machine.append),
        (pickle.APPENDS, _Machine.appends),
        (pickle.SETITEM, _Machine.set_item),
        (pickle.SETITEMS, _Machine.set_items),
        (pickle.LIST, _Machine.list_of),
        (pickle.DICT, _Machine.dict_of),
        (pickle.TUPLE, _Machine.tuple_of),
        (pickle.TUPLE1, _Machine.tuple1),
        (pickle.TUPLE2, _Machine.tuple2),
        (pickle.TUPLE3, _Machine.tuple3),
        (pickle.MEMOIZE, _Machine.memoize),
        (pickle.BINPUT, _Machine.put1),
        (pickle.LONG_BINPUT, _Machine.put4),
        (pickle.BINGET, _Machine.get),
        (pickle.LONG_BINGET, _Machine.get),
    )
}
_NAMES = {ord(operation.code): operation.name for operation in pickletools.opcodes}


def printable(text: str, longest: int = 80) -> str:
    """Text from a file, fit for a terminal: nothing in it moves the cursor or the eye."""
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[:longest]
    )
    return shown if len(text) <= longest else f"{shown}…"
