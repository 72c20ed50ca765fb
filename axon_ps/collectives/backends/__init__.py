"""The backends: each performs the collectives of one group over flat arrays. `base` defines the interface.

mock          threads of one process                    grpc           ranks anywhere, reduced on the shard servers
shm           processes of one host                     gloo           PyTorch's gloo
nccl          GPUs                                      hierarchical   one inside nodes, another across them
request       a collective call with its arrays, as a backend runs it
header        the comparison of the ranks' calls, if the transport has none
reason        the reason of a group's end, for transports that only report a broken connection
"""
