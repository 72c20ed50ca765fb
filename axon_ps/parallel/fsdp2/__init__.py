"""`fully_shard`: a module sharded in place, as by the function of the same name in torch.distributed.fsdp.

api          the function, and its arguments                  modules    the class that sharded modules get
marks        the modules of a model until its first use       optimizers   torch's optimizers on the servers
moments      torch's `optimizer.state`, from and to the servers
"""
