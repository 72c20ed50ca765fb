"""Messages in one direction: their order, the bound of what is queued, and the ways a wait ends."""

from __future__ import annotations

import asyncio

from axon_ps.rpc.calls.queue import MessageQueue


async def turn() -> None:
    """Let every other task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_messages_come_in_order() -> None:
    async def main() -> None:
        queue: MessageQueue[bytes] = MessageQueue()
        reading = asyncio.ensure_future(queue.get())
        await turn()
        for message in (b"a", b"b", b"c"):
            queue.put(message)
        assert await reading == b"a"
        assert await queue.get() == b"b"
        assert len(queue) == 1
        assert queue.pop_all() == [b"c"]
        assert len(queue) == 0

    asyncio.run(main())


def test_a_writer_waits_while_too_many_bytes_are_queued() -> None:
    async def main() -> None:
        queue: MessageQueue[bytes] = MessageQueue(10, len)
        assert await queue.add(b"x" * 9)
        assert await queue.add(b"y" * 9)
        writing = asyncio.ensure_future(queue.add(b"z"))
        await turn()
        assert not writing.done()
        assert await queue.get() == b"x" * 9
        assert await writing

    asyncio.run(main())


def test_after_a_close_the_rest_is_read_unless_it_is_dropped() -> None:
    async def main() -> None:
        for drop in (False, True):
            queue: MessageQueue[bytes] = MessageQueue(1, len)
            assert await queue.add(b"x")
            writing = asyncio.ensure_future(queue.add(b"y"))
            await turn()
            queue.close(drop=drop)
            assert not await writing
            assert await queue.get() == (None if drop else b"x")
            assert await queue.get() is None

    asyncio.run(main())


def test_a_reader_that_wants_no_more_gets_none_while_writers_go_on() -> None:
    async def main() -> None:
        queue: MessageQueue[bytes] = MessageQueue(10, len)
        reading = asyncio.ensure_future(queue.get())
        await turn()
        queue.end_input()
        assert await reading is None
        assert await queue.add(b"x")
        assert await queue.get() is None

    asyncio.run(main())


def test_a_reader_that_is_cancelled_takes_no_message() -> None:
    async def main() -> None:
        queue: MessageQueue[bytes] = MessageQueue()
        reading = asyncio.ensure_future(queue.get())
        await turn()
        queue.put(b"x")
        reading.cancel()
        await asyncio.wait([reading])
        assert await queue.get() == b"x"

    asyncio.run(main())
