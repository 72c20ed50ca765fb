"""Addresses and channel options."""

from __future__ import annotations

import pytest

from axon_ps.errors import ConfigurationError
from axon_ps.rpc import channels
from axon_ps.rpc.channels import address_of, connect, join_address, split_address
from axon_ps.rpc.security import Security
from rpc_fakes import run


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("host.example:65535", "host.example", 65535), ("[::1]:1", "::1", 1)],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


def test_brackets_are_not_doubled() -> None:
    assert join_address("[::1]", 5) == "[::1]:5"


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:8o", "::1:80", "host:٣"])
def test_what_is_not_an_address(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not host:port"):
        split_address(address)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", ".a"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(ConfigurationError, match="no host can have the name"):
        split_address(f"{host}:80")


def test_a_channel_knows_its_address() -> None:
    async def main() -> None:
        channel = connect("127.0.0.1:9", Security())
        assert address_of(channel) == "127.0.0.1:9"
        await channel.close()
        with pytest.raises(ConfigurationError, match="nowhere"):
            connect("nowhere", Security())

    run(main())


def test_limits_are_explicit_on_both_ends() -> None:
    for options in (dict(channels.CLIENT_OPTIONS), dict(channels.SERVER_OPTIONS)):
        assert options["grpc.max_send_message_length"] == channels.MAX_MESSAGE_BYTES
        assert options["grpc.max_receive_message_length"] == channels.MAX_MESSAGE_BYTES
        assert options["grpc.http2.lookahead_bytes"] == channels.LOOKAHEAD_BYTES
    assert channels.CALL_OPTIONS.keys() <= {*dict(channels.SERVER_OPTIONS), "grpc.http2.bdp_probe"}
    assert dict(channels.CLIENT_OPTIONS)["grpc.enable_http_proxy"] == 0
    assert dict(channels.SERVER_OPTIONS)["grpc.so_reuseport"] == 0
    assert len(dict(channels.CLIENT_OPTIONS)) == len(channels.CLIENT_OPTIONS)
    assert len(dict(channels.SERVER_OPTIONS)) == len(channels.SERVER_OPTIONS)
