"""The return of a coordinator: the order of joins, and the members' newer knowledge of the job. Pure."""
