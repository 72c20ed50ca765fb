"""The tests of streams that hold over whatever carries them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from axon_ps.errors import InvalidRequest
from tests.unit.rpc import test_service as service
from tests.unit.rpc import test_stream as stream
from tests.unit.rpc import test_stream_pool as pool_tests

RAISED = InvalidRequest("offset 7 is not in the slice")

STREAM_TESTS: list[Callable[[], None]] = [
    stream.test_echo,
    stream.test_several_tasks_may_write,
    stream.test_all_messages_before_a_good_end_can_be_read_later,
    stream.test_writing_after_a_half_close_is_closed,
    stream.test_writing_after_a_good_end_is_closed,
    *(partial(stream.test_cancelling_a_stream_closes_it_for_other_tasks, w) for w in ("read", "iterate", "write")),
    *(partial(stream.test_a_stream_that_is_left_is_cancelled, how) for how in ("deleted", "broken out of", "left")),
    stream.test_a_task_cancelled_while_reading_takes_the_stream_with_it,
    stream.test_a_server_that_stops_breaks_its_streams,
    service.test_chunks_travel_as_bytes_in_both_directions,
    service.test_streams_go_both_ways,
    partial(service.test_errors_arrive_after_messages_of_a_stream, RAISED),
    partial(service.test_errors_arrive_while_the_client_still_writes, RAISED),
    partial(service.test_errors_arrive_in_a_two_way_stream, RAISED),
    service.test_a_servicer_whose_inner_task_was_cancelled_still_answers,
    pool_tests.test_the_next_use_gets_the_same_stream,
    pool_tests.test_streams_that_broke_while_idle_are_replaced,
    pool_tests.test_a_use_that_is_not_over_in_time,
]


def name_of(test: Callable[[], None]) -> str:
    """What pytest calls one."""
    return getattr(test, "func", test).__name__
