//! Decides the next step of every replica.
