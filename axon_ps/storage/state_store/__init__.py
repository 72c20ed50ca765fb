"""The coordinator's durable state: records by key, written in atomic batches.

Each kind of store has a name, by which a coordinator's `--state NAME:ADDRESS` selects it. `base` has the interface of
stores. Each other module is one kind (`etcd_cluster` and `etcd_leadership` are parts of `etcd`).

Invariants: when `apply` returns, the batch is not lost with the process or the machine, except in memory and in an
`UNSYNCED` sqlite file. When it raises, none of the batch is visible to a later `load` (see `SharedStateStore` for the
one exception).
"""

from axon_ps.storage.state_store.base import Record, SharedStateStore, StateStore, open_state, open_store, register
from axon_ps.storage.state_store.etcd import EtcdStateStore
from axon_ps.storage.state_store.memory import MemoryStateStore
from axon_ps.storage.state_store.sqlite import SqliteStateStore

__all__ = [
    "EtcdStateStore",
    "MemoryStateStore",
    "Record",
    "SharedStateStore",
    "SqliteStateStore",
    "StateStore",
    "open_state",
    "open_store",
    "register",
]
