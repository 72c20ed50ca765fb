"""Operations on one server as a deterministic state machine, and the cut of operations into stripes. No I/O."""
