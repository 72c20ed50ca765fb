"""The steps of every model: attempts, votes, decisions, and whom the others wait for. Pure."""
