"""Models under study: checkpoints, the anatomy of their residual stream, capture, weights of attention and routers."""
