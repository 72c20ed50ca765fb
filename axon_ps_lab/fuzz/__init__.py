"""Hostile messages, connections and checkpoints for axon_ps: `make lab NAME=fuzz`.

- `targets`: the parts of axon_ps that are attacked inside of a process, guided by coverage (`guided`).
- `hostile`: connections, servers and checkpoint directories that break the rules of their formats.
- `outside`, `attackers`: real services under attack, with a job that trains beside (`beside`).
- `entropy`, `grown`: choices, and the messages that are grown from the schema by them.
- `findings`: the cases that went wrong, as files that can be sent again.
"""
