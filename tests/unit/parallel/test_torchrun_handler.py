"""torchrun's agents with --rdzv-backend=axon: what they may be given."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from axon_ps.errors import ConfigurationError
from axon_ps.parallel.torchrun import handler


@pytest.mark.parametrize("name", [*handler.SECONDS, handler.ATTEMPTS])
@pytest.mark.parametrize("given", ["0", "-1", "1.5", "soon"])
def test_a_number_that_cannot_be_is_refused_and_not_replaced(name: str, given: str) -> None:
    parameters = RendezvousParameters("axon", "127.0.0.1:1", "run", 1, 1, **{name: given})
    with pytest.raises(ConfigurationError, match=rf"--rdzv-conf has {name}={given}; give a whole number of at least 1"):
        handler.create(parameters)
