"""A worker's part in the training steps of one model.

client      `StepClient`: the ticket of a step, the vote, the decision; it has the others
view        what this worker knows of the model · stepping    synchronous or asynchronous: how steps follow each other
parameters  gathering · gradients  pushing      calls       running both, and ending what cannot succeed any more
"""
