"""A coordinator that comes back: who is let in when, and what members know that its state does not. Pure."""
