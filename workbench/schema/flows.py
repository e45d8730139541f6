"""Variables of a flow dataset: dimensions, units and meaning, as in `workbench.schema`."""

from __future__ import annotations

from workbench.schema.runs import variables

#: Measures of the states between blocks, of blocks and of sublayers; NaN where they do not exist or cannot be measured.
FLOW = variables("""
state_rms | boundary | f | state RMS | 1 | root mean square of the residual stream's entries
gradient_norm | boundary | f | gradient norm | 1 | norm of the loss's gradient with respect to all states of the \
boundary
token_cosine | boundary | f | token cosine | 1 | mean cosine of two tokens of a sequence; 1 if all are parallel
effective_rank | boundary | f | relative effective rank | 1 | exp of the entropy of the singular values of the states, \
over the largest possible rank
signal_gain | layer | f | signal gain | 1 | RMS of the states leaving over RMS of those entering
gradient_gain | layer | f | gradient gain | 1 | norm of the gradient at the input of the block over that at its output
sublayer_signal_gain | layer sublayer | f | signal gain | 1 | RMS of the stream after the sublayer over that before it
sublayer_gradient_gain | layer sublayer | f | gradient gain | 1 | norm of the gradient before the sublayer over that \
after it
branch_ratio | layer sublayer | f | branch ratio | 1 | RMS of the branch over RMS of the stream that it is added to
block_singular_value | layer singular | f | block singular value | 1 | of the Jacobian of the block, largest first
block_singular_mean | layer | f | RMS singular value | 1 | root mean square of all singular values of the Jacobian of \
the block
end_to_end_singular_value | singular | f | end-to-end singular value | 1 | of the Jacobian of all blocks in sequence, \
largest first
end_to_end_singular_mean | | f | RMS end-to-end singular value | 1 | root mean square of all singular values of all \
blocks in sequence
attention_entropy_share | layer head | f | normalized attention entropy | 1 | entropy over log(visible tokens), mean \
over tokens that attend to several
attention_logit_std | layer head | f | attention logit scale | 1 | standard deviation of the logits of a token, RMS \
over tokens
attention_logit_max | layer head | f | largest attention logit | 1 | over all tokens
sink_share | layer head | f | attention sink fraction | 1 | attention to the first token of the sequence, mean over \
tokens that can attend to others
routing_entropy_share | layer | f | normalized routing entropy | 1 | entropy of the full softmax over log(experts), \
mean over tokens
max_violation | layer | f | MaxVio | 1 | (largest - mean) / mean of the load of the experts
routing_margin | layer | f | routing margin | 1 | probability of the last chosen expert less that of the first \
rejected, mean over tokens
""")
