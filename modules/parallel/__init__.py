"""Work sharded over the axes of a device mesh.

`axes` maps the axes of arrays to axes of the mesh, `kernel_calls` runs kernels on each device for
its shard, `loss_sums` sums over tokens. Layers, kernels, losses and optimizers call this package;
it calls none of them.
"""
