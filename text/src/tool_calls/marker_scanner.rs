//! Finds marks in text that comes character by character. What could begin a mark is held back.

/// The beginning of a mark, held back: less than the longest mark.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MarkerScanner {
    /// What is held is the beginning of this mark, and maybe of others.
    marker: &'static str,
    /// Bytes of it that are held.
    len: usize,
}

impl MarkerScanner {
    /// Takes a character. Returns the place of the mark it completes, which is then forgotten; else
    /// hands every character that can begin none to `release`. No mark may begin another one, and all
    /// begin with an ASCII character.
    #[inline]
    pub(crate) fn push(
        &mut self,
        c: char,
        marks: &[&'static str],
        mut release: impl FnMut(char),
    ) -> Option<usize> {
        if self.len > 0 {
            let (held, rest) = self.marker.split_at(self.len);
            if rest.len() > c.len_utf8() && rest.starts_with(c) {
                self.len += c.len_utf8();
                return None; // What is held began this mark, and still does.
            }
            // The longest end of what is held, with the character, that still begins a mark.
            for (from, _) in held
                .char_indices()
                .filter(|&(at, c)| at == 0 || marks.iter().any(|mark| begins(mark, c)))
            {
                let end = &held[from..];
                let goes_on = |mark: &&str| goes_on(mark, end, c);
                if let Some(found) = marks.iter().position(goes_on) {
                    held[..from].chars().for_each(release);
                    return self.hold_back(found, end.len() + c.len_utf8(), marks);
                }
            }
            self.len = 0;
            held.chars().for_each(&mut release);
        }
        let Some(found) = marks.iter().position(|mark| begins(mark, c)) else {
            release(c);
            return None;
        };
        self.hold_back(found, c.len_utf8(), marks)
    }

    fn hold_back(&mut self, found: usize, len: usize, marks: &[&'static str]) -> Option<usize> {
        (self.marker, self.len) = (marks[found], len);
        (len == self.marker.len()).then(|| {
            self.len = 0;
            found
        })
    }

    /// The text has ended: hands over what is held.
    pub(crate) fn finish(&mut self, release: impl FnMut(char)) {
        self.marker[..std::mem::take(&mut self.len)].chars().for_each(release);
    }

    /// Whether nothing is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[inline]
fn begins(mark: &str, c: char) -> bool {
    c.is_ascii() && mark.as_bytes().first() == Some(&(c as u8))
}

/// Whether `c` follows the beginning `end` of a mark. Most marks are told apart by one byte.
#[inline]
fn goes_on(mark: &str, end: &str, c: char) -> bool {
    let first = c.encode_utf8(&mut [0; 4]).as_bytes()[0];
    mark.as_bytes().get(end.len()) == Some(&first)
        && mark.strip_prefix(end).is_some_and(|rest| rest.starts_with(c))
}
