"""Who reaches whom: the coordinator its members, and the members each other. Pure."""
