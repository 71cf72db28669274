//! One file per architecture, composed of parallel-aware layers.
