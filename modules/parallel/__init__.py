"""Work cut over the axes of a device mesh: `axes` says which axis of an array lies over which axes
of the mesh, `kernel_calls` runs kernels on each device for its own part, `loss_sums` sums over
tokens. Layers, kernels, losses and optimizers call it; it calls none of them.
"""
