//! Reads the secret that the nodes of a cluster share, from a file or an environment variable.

use std::path::Path;

use engine::nodes::ClusterSecret;

use crate::config::{CommandLineError, rejected};

/// Environment variable with the cluster secret, read if no file is given. Child processes are started
/// without it.
pub(crate) const CLUSTER_SECRET_VARIABLE: &str = "HADRON_CLUSTER_SECRET";
/// Minimum length of a cluster secret in bytes. An attacker who has recorded a handshake can test candidate
/// secrets offline without limit, so a short secret could be found.
const SECRET_BYTES_MIN: usize = 16;

/// Reads the cluster secret from a file, and checks it.
pub(super) fn read_secret(path: &Path) -> Result<ClusterSecret, CommandLineError> {
    let source = format!("--cluster-secret-file {}", path.display());
    match std::fs::read_to_string(path) {
        Ok(text) => check_secret(ClusterSecret::new(&text), &source),
        Err(error) => rejected(format!("{source}: {error}")),
    }
}

/// Returns the secret if it has at least `SECRET_BYTES_MIN` bytes.
pub(super) fn check_secret(
    secret: ClusterSecret,
    source: &str,
) -> Result<ClusterSecret, CommandLineError> {
    match secret.bytes().len() {
        bytes if bytes < SECRET_BYTES_MIN => {
            rejected(format!("{source}: {bytes} bytes, a secret needs at least {SECRET_BYTES_MIN}"))
        }
        _ => Ok(secret),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_trimmed_length_checked_and_redacted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "  0123456789abcdef\n").unwrap();
        let secret = read_secret(&path).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "ClusterSecret(..)");
        std::fs::write(&path, "0123456789abcde\n").unwrap();
        let short = read_secret(&path).unwrap_err().to_string();
        assert!(short.ends_with("15 bytes, a secret needs at least 16"), "{short}");
        std::fs::remove_file(&path).unwrap();
        assert!(read_secret(&path).unwrap_err().to_string().contains("--cluster-secret-file"));
    }
}
