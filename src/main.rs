//! Entry point: parses the command line and runs one role.
fn main() {}
