//! Finds markers in text that arrives character by character. Text that may begin a marker is held back.

/// Finds markers, and holds back text that is a prefix of a marker.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MarkerScanner {
    /// Marker of which the text held back is a prefix; the text may be a prefix of other markers too.
    marker: &'static str,
    /// Number of bytes held back.
    len: usize,
}

impl MarkerScanner {
    /// Processes the next character. If it completes a marker, drops the marker and returns its index;
    /// otherwise passes each character that cannot belong to a marker to `release`. No marker may be a prefix
    /// of another marker, and all markers must begin with an ASCII character.
    #[inline]
    pub(crate) fn push(
        &mut self,
        c: char,
        markers: &[&'static str],
        mut release: impl FnMut(char),
    ) -> Option<usize> {
        if self.len > 0 {
            let (held_back, rest) = self.marker.split_at(self.len);
            if rest.len() > c.len_utf8() && rest.starts_with(c) {
                self.len += c.len_utf8();
                return None; // The text held back is still a prefix of this marker.
            }
            // Find the longest suffix of the text held back that, followed by the character, is a prefix of a
            // marker.
            for (from, _) in held_back
                .char_indices()
                .filter(|&(at, c)| at == 0 || markers.iter().any(|marker| begins(marker, c)))
            {
                let end = &held_back[from..];
                let continues = |marker: &&str| continues(marker, end, c);
                if let Some(found) = markers.iter().position(continues) {
                    held_back[..from].chars().for_each(release);
                    return self.hold_back(found, end.len() + c.len_utf8(), markers);
                }
            }
            self.len = 0;
            held_back.chars().for_each(&mut release);
        }
        let Some(found) = markers.iter().position(|marker| begins(marker, c)) else {
            release(c);
            return None;
        };
        self.hold_back(found, c.len_utf8(), markers)
    }

    fn hold_back(&mut self, found: usize, len: usize, markers: &[&'static str]) -> Option<usize> {
        (self.marker, self.len) = (markers[found], len);
        (len == self.marker.len()).then(|| {
            self.len = 0;
            found
        })
    }

    /// Ends the text: passes the text held back to `release`.
    pub(crate) fn finish(&mut self, release: impl FnMut(char)) {
        self.marker[..std::mem::take(&mut self.len)].chars().for_each(release);
    }

    /// Whether no text is held back.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[inline]
fn begins(marker: &str, c: char) -> bool {
    c.is_ascii() && marker.as_bytes().first() == Some(&(c as u8))
}

/// Whether `marker` begins with `end` followed by `c`. For most markers, comparing one byte is enough to
/// return false.
#[inline]
fn continues(marker: &str, end: &str, c: char) -> bool {
    let first = c.encode_utf8(&mut [0; 4]).as_bytes()[0];
    marker.as_bytes().get(end.len()) == Some(&first)
        && marker.strip_prefix(end).is_some_and(|rest| rest.starts_with(c))
}
