"""Operations on one server as a deterministic state machine, and how an operation is cut into stripes. No I/O."""
