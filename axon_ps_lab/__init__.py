"""The laboratory beside the product: tools that inject faults into axon_ps, compare its results, and measure it.

- `faults`: a cluster whose processes stop at an exact moment, and whose connections can be disturbed.
- `chaos`: seeded campaigns of faults against a job, and their reports.
- `campaigns`: programs that `make lab` runs: the grid of faults, soaks, kills of whole jobs, failovers, loaders.
- `containers`, `upgrade`: jobs in containers, and a job whose processes are upgraded one by one.
- `interleavings`: the real services under random faults in virtual time, which finds bugs of axon_ps.
- `fuzz`: hostile messages, connections and checkpoints.
- `conformance`: the cases that every `Backend` has to pass.
- `device`: a stand-in for a GPU.
- `simulate`: forecasts for a cluster that is not rented yet; it simulates no fault of the code.
- `report`: the table and the record of a benchmark or campaign; `engine_driver`: shard engines without a network.
- `watchdog`: names the code that held an event loop for long.
- `etcd`, `clock`: an etcd cluster on this machine; a clock whose time changes on command.
- `commands`: the commands `chaos`, `simulate` and `doctor --measure` of `axon-ps`.

The product does not import it: `axon-ps` finds these commands by their names.
"""
