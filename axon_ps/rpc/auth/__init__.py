"""Callers: identities and roles, tokens, the job's authority and its certificates, and a server's checks of them.

identity      roles, and SPIFFE IDs
tokens        the job's secret, and the tokens of roles that are made from it
authority     certificates that are made from it
certificates  this process's, renewed while it runs; a peer's, read
watched_file  files that are replaced while a job runs
loopback      which addresses need none of it
credentials   the caller of one call, and what is revoked
interceptor   refuses calls before a servicer gets them

What may be called with which role is `rpc.access`; when TLS is used, `rpc.security`.
"""
