"""Callers: identities and roles, tokens, the job's authority and its certificates, and a server's checks of them.

identity      roles, and SPIFFE IDs
tokens        the job's secret, and the tokens of roles that are made from it
authority     certificates that are made from it
certificates  this process's certificate, renewed while it runs; reading a peer's
watched_file  files that are replaced while a job runs
loopback      addresses that only this machine can reach
credentials   the caller of one call, and the credentials that are revoked
interceptor   refuses calls before a servicer gets them

`rpc.access` has the roles of each call; `rpc.security` decides if TLS is used.
"""
