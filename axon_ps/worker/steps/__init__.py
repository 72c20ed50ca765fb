"""A worker's part in the training steps of one model.

client      `StepClient`: the ticket of a step, the vote, the decision; it has the others
view        this worker's knowledge of the model
stepping    the order of steps, synchronous or asynchronous
parameters  gathering
gradients   pushing
calls       the running calls of both, and the end of calls that cannot succeed any more
"""
