"""The backends: each performs the collectives of one group over flat arrays. `base` says what one is.

mock          threads of one process                    grpc           ranks anywhere, reduced on the shard servers
shm           processes of one host                     gloo           PyTorch's gloo
nccl          GPUs                                      hierarchical   one inside of nodes, another between them
request       a collective with its arrays in one piece, for backends that perform such pieces
header · stage · topology   what several of them share
"""
