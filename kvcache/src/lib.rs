//! KV blocks, block tables and the prefix index; counts, never touches a device.
