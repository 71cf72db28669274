//! The secret that the nodes of a cluster share.

use std::fmt;
use std::path::Path;

use crate::config::{CommandLineError, rejected};

/// The variable that holds it where no file does. Children have no use for it.
pub(crate) const CLUSTER_SECRET_VARIABLE: &str = "HADRON_CLUSTER_SECRET";
/// What can be guessed is no secret: whoever hears a handshake may try as many as he likes.
const SECRET_BYTES_MIN: usize = 16;

/// A secret; it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(String);

impl ClusterSecret {
    /// The text without the white space around it, which files end with.
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// What is proved to be known.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self, CommandLineError> {
        let place = format!("--cluster-secret-file {}", path.display());
        match std::fs::read_to_string(path) {
            Ok(text) => Self::new(&text).checked(&place),
            Err(error) => rejected(format!("{place}: {error}")),
        }
    }

    /// Itself, if it is long enough.
    pub(super) fn checked(self, place: &str) -> Result<Self, CommandLineError> {
        match self.0.len() {
            bytes if bytes < SECRET_BYTES_MIN => rejected(format!(
                "{place}: {bytes} bytes, a secret has at least {SECRET_BYTES_MIN}"
            )),
            _ => Ok(self),
        }
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
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
        let secret = ClusterSecret::read(&path).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        std::fs::write(&path, "0123456789abcde\n").unwrap();
        let short = ClusterSecret::read(&path).unwrap_err().to_string();
        assert!(short.ends_with("15 bytes, a secret has at least 16"), "{short}");
        std::fs::remove_file(&path).unwrap();
        assert!(
            ClusterSecret::read(&path).unwrap_err().to_string().contains("--cluster-secret-file")
        );
    }
}
