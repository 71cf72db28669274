//! What parsers make of a model's output: reasoning, content and tool calls, piece by piece.

/// One piece of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputPiece<'a> {
    /// Text between the marks of reasoning.
    Reasoning(&'a str),
    /// Text for the user.
    Content(&'a str),
    /// A call begins. Nothing may take it back: its arguments follow as they come.
    Call {
        /// Place among the calls, from 0.
        index: u32,
        /// Name of the function.
        name: &'a str,
        /// Byte of the output at which the call's syntax begins.
        from: usize,
    },
    /// The next part of a call's arguments, a JSON object in the end.
    Arguments {
        /// Of which call.
        index: u32,
        /// The part.
        text: &'a str,
    },
    /// A call is complete.
    End {
        /// Which one.
        index: u32,
    },
    /// A call broke off or turned out to be malformed: its syntax is content to whom nothing has
    /// been shown yet.
    Broken {
        /// Which one.
        index: u32,
        /// Byte of the output behind its syntax.
        to: usize,
    },
}

/// Pieces in their order; adjacent ones of a kind are one. The text of all of them lies in one buffer: whoever clears
/// the list and fills it again allocates nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputPieces {
    pieces: Vec<PlacedPiece>,
    text: String,
}

/// A piece whose text begins at a byte of the buffer, and ends where that of the next one begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PlacedPiece {
    kind: PieceKind,
    start: usize,
}

/// A piece without its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PieceKind {
    Reasoning,
    Content,
    Call { index: u32, from: usize },
    Arguments { index: u32 },
    End { index: u32 },
    Broken { index: u32, to: usize },
}

impl OutputPieces {
    /// Pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Forgets everything but the memory.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.text.clear();
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = OutputPiece<'_>> {
        let ends = self.pieces.iter().skip(1).map(|next| next.start);
        let ends = ends.chain([self.text.len()]);
        self.pieces.iter().zip(ends).map(|(piece, end)| piece.read(&self.text[piece.start..end]))
    }

    /// Appends `more`, merging where one continues another.
    pub fn append(&mut self, more: &Self) {
        for piece in more.iter() {
            let (kind, text) = piece.parts();
            self.open_piece(kind);
            self.text.push_str(text);
        }
    }

    /// Goes on with the last piece if it is of this kind, else begins one.
    #[inline]
    fn open_piece(&mut self, kind: PieceKind) {
        let goes_on =
            matches!(kind, PieceKind::Reasoning | PieceKind::Content | PieceKind::Arguments { .. })
                && self.pieces.last().is_some_and(|last| last.kind == kind);
        if !goes_on {
            self.pieces.push(PlacedPiece { kind, start: self.text.len() });
        }
    }
}

impl PlacedPiece {
    fn read(self, text: &str) -> OutputPiece<'_> {
        match self.kind {
            PieceKind::Reasoning => OutputPiece::Reasoning(text),
            PieceKind::Content => OutputPiece::Content(text),
            PieceKind::Call { index, from } => OutputPiece::Call { index, name: text, from },
            PieceKind::Arguments { index } => OutputPiece::Arguments { index, text },
            PieceKind::End { index } => OutputPiece::End { index },
            PieceKind::Broken { index, to } => OutputPiece::Broken { index, to },
        }
    }
}

impl<'a> OutputPiece<'a> {
    fn parts(self) -> (PieceKind, &'a str) {
        match self {
            Self::Reasoning(text) => (PieceKind::Reasoning, text),
            Self::Content(text) => (PieceKind::Content, text),
            Self::Call { index, name, from } => (PieceKind::Call { index, from }, name),
            Self::Arguments { index, text } => (PieceKind::Arguments { index }, text),
            Self::End { index } => (PieceKind::End { index }, ""),
            Self::Broken { index, to } => (PieceKind::Broken { index, to }, ""),
        }
    }
}

/// Where the pieces of one push go, and where in the output the parser stands.
#[derive(Debug)]
pub(super) struct PieceSink<'a> {
    list: &'a mut OutputPieces,
    /// Bytes of the output up to and including the character being read.
    pub(super) bytes_read: usize,
}

impl<'a> PieceSink<'a> {
    #[inline]
    pub(super) fn new(list: &'a mut OutputPieces, at: usize) -> Self {
        Self { list, bytes_read: at }
    }

    #[inline]
    pub(super) fn reasoning(&mut self, c: char) {
        self.list.open_piece(PieceKind::Reasoning);
        self.list.text.push(c);
    }

    #[inline]
    pub(super) fn content(&mut self, c: char) {
        self.list.open_piece(PieceKind::Content);
        self.list.text.push(c);
    }

    /// Content that nobody looks into.
    pub(super) fn text(&mut self, more: &str) {
        self.add(PieceKind::Content, more);
    }

    #[inline]
    pub(super) fn argument(&mut self, index: u32, c: char) {
        self.list.open_piece(PieceKind::Arguments { index });
        self.list.text.push(c);
    }

    pub(super) fn arguments(&mut self, index: u32, part: &str) {
        self.add(PieceKind::Arguments { index }, part);
    }

    fn add(&mut self, kind: PieceKind, text: &str) {
        if !text.is_empty() {
            self.list.open_piece(kind);
            self.list.text.push_str(text);
        }
    }

    pub(super) fn begin_call(&mut self, index: u32, name: &str, from: usize) {
        self.list.open_piece(PieceKind::Call { index, from });
        self.list.text.push_str(name);
    }

    pub(super) fn end_call(&mut self, index: u32) {
        self.list.open_piece(PieceKind::End { index });
    }

    pub(super) fn broken_call(&mut self, index: u32, to: usize) {
        self.list.open_piece(PieceKind::Broken { index, to });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_pieces_are_merged_and_read_back() {
        let mut list = OutputPieces::default();
        let mut out = PieceSink::new(&mut list, 9);
        out.text("");
        out.content('a');
        out.text("é");
        out.begin_call(0, "f", 3);
        out.end_call(0);
        out.begin_call(1, "", 7);
        out.arguments(1, "{");
        out.argument(1, '}');
        out.broken_call(1, 9);
        out.reasoning('z');
        let all = [
            OutputPiece::Content("aé"),
            OutputPiece::Call { index: 0, name: "f", from: 3 },
            OutputPiece::End { index: 0 },
            OutputPiece::Call { index: 1, name: "", from: 7 },
            OutputPiece::Arguments { index: 1, text: "{}" },
            OutputPiece::Broken { index: 1, to: 9 },
            OutputPiece::Reasoning("z"),
        ];
        assert!(list.iter().eq(all) && list.len() == all.len());

        let mut more = OutputPieces::default();
        PieceSink::new(&mut more, 0).reasoning('y');
        PieceSink::new(&mut more, 0).text("b");
        list.append(&more);
        assert!(list.iter().skip(6).eq([OutputPiece::Reasoning("zy"), OutputPiece::Content("b")]));
        list.clear();
        assert!(list.is_empty() && list.iter().next().is_none());
    }
}
