//! Time of one scheduler step with a zero-time device.

fn main() {}
