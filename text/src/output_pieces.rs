//! Pieces of a parsed output in order: parts of the reasoning, the content and the tool calls.

/// One piece of a parsed output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputPiece<'a> {
    /// Text between the reasoning markers.
    Reasoning(&'a str),
    /// Text of the reply itself (`content` in API replies).
    Content(&'a str),
    /// A tool call begins. Its arguments are emitted while they are generated, so the call cannot be
    /// retracted.
    Call {
        /// Index of the tool call in the output, from 0.
        index: u32,
        /// Name of the function.
        name: &'a str,
        /// Byte offset in the output at which the call's syntax begins.
        from: usize,
    },
    /// Next part of a tool call's arguments. The concatenated parts are a JSON object.
    Arguments {
        /// Index of the tool call.
        index: u32,
        /// Text of this part.
        text: &'a str,
    },
    /// A tool call is complete.
    End {
        /// Index of the tool call.
        index: u32,
    },
    /// A tool call was truncated or is malformed. A non-streaming reply returns the text of the call as
    /// content, because no part of the call has been sent yet.
    Broken {
        /// Index of the tool call.
        index: u32,
        /// Byte offset in the output at which the call's syntax ends.
        to: usize,
    },
}

/// List of pieces in order, in which adjacent pieces of the same kind are merged. The text of all pieces is
/// in one buffer, so a list that is cleared and refilled allocates nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputPieces {
    pieces: Vec<OutputPieceSpan>,
    text: String,
}

/// Kind of a piece, and the offset at which its text starts in the buffer. The text ends where the text of
/// the next piece starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OutputPieceSpan {
    kind: OutputPieceKind,
    start: usize,
}

/// Kind of a piece, with all fields except the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutputPieceKind {
    Reasoning,
    Content,
    Call { index: u32, from: usize },
    Arguments { index: u32 },
    End { index: u32 },
    Broken { index: u32, to: usize },
}

impl OutputPieces {
    /// Returns the number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are no pieces.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Clears the list and keeps its allocations.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.text.clear();
    }

    /// Iterates over all pieces in order.
    pub fn iter(&self) -> impl Iterator<Item = OutputPiece<'_>> {
        let ends = self.pieces.iter().skip(1).map(|next| next.start);
        let ends = ends.chain([self.text.len()]);
        self.pieces.iter().zip(ends).map(|(piece, end)| piece.read(&self.text[piece.start..end]))
    }

    /// Appends the pieces of `more`, merging adjacent pieces of the same kind.
    pub fn append(&mut self, more: &Self) {
        for piece in more.iter() {
            let (kind, text) = piece.parts();
            self.open_piece(kind);
            self.text.push_str(text);
        }
    }

    /// Prepares the list for appending text of the kind `kind`. If the last piece is reasoning, content or
    /// arguments of this kind, the text continues this piece; otherwise an empty piece is appended.
    #[inline]
    fn open_piece(&mut self, kind: OutputPieceKind) {
        let continues = matches!(
            kind,
            OutputPieceKind::Reasoning
                | OutputPieceKind::Content
                | OutputPieceKind::Arguments { .. }
        ) && self.pieces.last().is_some_and(|last| last.kind == kind);
        if !continues {
            self.pieces.push(OutputPieceSpan { kind, start: self.text.len() });
        }
    }
}

impl OutputPieceSpan {
    fn read(self, text: &str) -> OutputPiece<'_> {
        match self.kind {
            OutputPieceKind::Reasoning => OutputPiece::Reasoning(text),
            OutputPieceKind::Content => OutputPiece::Content(text),
            OutputPieceKind::Call { index, from } => OutputPiece::Call { index, name: text, from },
            OutputPieceKind::Arguments { index } => OutputPiece::Arguments { index, text },
            OutputPieceKind::End { index } => OutputPiece::End { index },
            OutputPieceKind::Broken { index, to } => OutputPiece::Broken { index, to },
        }
    }
}

impl<'a> OutputPiece<'a> {
    fn parts(self) -> (OutputPieceKind, &'a str) {
        match self {
            Self::Reasoning(text) => (OutputPieceKind::Reasoning, text),
            Self::Content(text) => (OutputPieceKind::Content, text),
            Self::Call { index, name, from } => (OutputPieceKind::Call { index, from }, name),
            Self::Arguments { index, text } => (OutputPieceKind::Arguments { index }, text),
            Self::End { index } => (OutputPieceKind::End { index }, ""),
            Self::Broken { index, to } => (OutputPieceKind::Broken { index, to }, ""),
        }
    }
}

/// Writer with which the output parsers append pieces to a list. It holds the current position in the output,
/// from which the byte offsets in pieces are computed.
#[derive(Debug)]
pub(super) struct OutputPieceWriter<'a> {
    list: &'a mut OutputPieces,
    /// Length in bytes of the output up to and including the character being parsed.
    pub(super) bytes_read: usize,
}

impl<'a> OutputPieceWriter<'a> {
    #[inline]
    pub(super) fn new(list: &'a mut OutputPieces, at: usize) -> Self {
        Self { list, bytes_read: at }
    }

    /// Returns the byte offset in the output of the character being parsed, which is `c`.
    pub(super) fn start_of(&self, c: char) -> usize {
        self.bytes_read - c.len_utf8()
    }

    #[inline]
    pub(super) fn reasoning(&mut self, c: char) {
        self.list.open_piece(OutputPieceKind::Reasoning);
        self.list.text.push(c);
    }

    #[inline]
    pub(super) fn content(&mut self, c: char) {
        self.list.open_piece(OutputPieceKind::Content);
        self.list.text.push(c);
    }

    /// Appends the text `more` as content.
    pub(super) fn text(&mut self, more: &str) {
        self.add(OutputPieceKind::Content, more);
    }

    #[inline]
    pub(super) fn argument(&mut self, index: u32, c: char) {
        self.list.open_piece(OutputPieceKind::Arguments { index });
        self.list.text.push(c);
    }

    pub(super) fn arguments(&mut self, index: u32, part: &str) {
        self.add(OutputPieceKind::Arguments { index }, part);
    }

    fn add(&mut self, kind: OutputPieceKind, text: &str) {
        if !text.is_empty() {
            self.list.open_piece(kind);
            self.list.text.push_str(text);
        }
    }

    pub(super) fn begin_call(&mut self, index: u32, name: &str, from: usize) {
        self.list.open_piece(OutputPieceKind::Call { index, from });
        self.list.text.push_str(name);
    }

    pub(super) fn end_call(&mut self, index: u32) {
        self.list.open_piece(OutputPieceKind::End { index });
    }

    pub(super) fn broken_call(&mut self, index: u32, to: usize) {
        self.list.open_piece(OutputPieceKind::Broken { index, to });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_pieces_are_merged() {
        let mut list = OutputPieces::default();
        let mut out = OutputPieceWriter::new(&mut list, 9);
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
        OutputPieceWriter::new(&mut more, 0).reasoning('y');
        OutputPieceWriter::new(&mut more, 0).text("b");
        list.append(&more);
        assert!(list.iter().skip(6).eq([OutputPiece::Reasoning("zy"), OutputPiece::Content("b")]));
        list.clear();
        assert!(list.is_empty() && list.iter().next().is_none());
    }
}
