"""Models under study: checkpoints, anatomy and capture of the residual stream, weights of attention and routers."""
