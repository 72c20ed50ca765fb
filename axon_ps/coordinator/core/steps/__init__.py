"""The steps of every model: attempts, votes, decisions and stragglers. Pure."""
