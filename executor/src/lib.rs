//! One per device: weights, KV bytes, and the forward pass a batch asks for.
