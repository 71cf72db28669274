//! The secret that the nodes of a cluster share.

use std::fmt;
use std::path::Path;

use crate::config::{ConfigError, refused};

/// The variable that holds it where no file does. Children have no use for it.
pub(crate) const VARIABLE: &str = "HADRON_CLUSTER_SECRET";
/// What can be guessed is no secret: whoever hears a handshake may try as many as he likes.
const BYTES_MIN: usize = 16;

/// A secret; it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text without the white space around it, which files end with.
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// What is proved to be known.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let place = format!("--cluster-secret-file {}", path.display());
        match std::fs::read_to_string(path) {
            Ok(text) => Self::new(&text).checked(&place),
            Err(error) => refused(format!("{place}: {error}")),
        }
    }

    /// Itself, if it is long enough.
    pub(super) fn checked(self, place: &str) -> Result<Self, ConfigError> {
        match self.0.len() {
            bytes if bytes < BYTES_MIN => {
                refused(format!("{place}: {bytes} bytes, a secret has at least {BYTES_MIN}"))
            }
            _ => Ok(self),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_trimmed_measured_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "  0123456789abcdef\n").unwrap();
        let secret = Secret::read(&path).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        std::fs::write(&path, "0123456789abcde\n").unwrap();
        let short = Secret::read(&path).unwrap_err().to_string();
        assert!(short.ends_with("15 bytes, a secret has at least 16"), "{short}");
        std::fs::remove_file(&path).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("--cluster-secret-file"));
    }
}
