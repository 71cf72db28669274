//! What parsers make of a model's output: reasoning, content and tool calls, piece by piece.

/// One piece of an output. Adjacent pieces of a kind are merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text between the marks of reasoning.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call begins. Nothing may take it back: its arguments follow as they come.
    Call {
        /// Place among the calls, from 0.
        index: u32,
        /// Name of the function.
        name: String,
        /// Byte of the output at which the call's syntax begins.
        from: usize,
    },
    /// The next part of a call's arguments, a JSON object in the end.
    Arguments {
        /// Of which call.
        index: u32,
        /// The part.
        text: String,
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

/// The pieces of one push, in order, and where in the output the parser stands.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    list: &'a mut Vec<Piece>,
    /// Bytes of the output up to and including the character being read.
    pub(super) at: usize,
}

impl<'a> Pieces<'a> {
    #[inline]
    pub(super) fn new(list: &'a mut Vec<Piece>, at: usize) -> Self {
        Self { list, at }
    }

    #[inline]
    pub(super) fn reasoning(&mut self, c: char) {
        match self.list.last_mut() {
            Some(Piece::Reasoning(text)) => text.push(c),
            _ => self.list.push(Piece::Reasoning(c.into())),
        }
    }

    #[inline]
    pub(super) fn content(&mut self, c: char) {
        match self.list.last_mut() {
            Some(Piece::Content(text)) => text.push(c),
            _ => self.list.push(Piece::Content(c.into())),
        }
    }

    /// Content that nobody looks into.
    pub(super) fn text(&mut self, more: &str) {
        match self.list.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Content(text)) => text.push_str(more),
            _ => self.list.push(Piece::Content(more.to_owned())),
        }
    }

    #[inline]
    pub(super) fn argument(&mut self, index: u32, c: char) {
        match self.list.last_mut() {
            Some(Piece::Arguments { index: last, text }) if *last == index => text.push(c),
            _ => self.list.push(Piece::Arguments { index, text: c.into() }),
        }
    }

    pub(super) fn arguments(&mut self, index: u32, part: &str) {
        match self.list.last_mut() {
            Some(Piece::Arguments { index: last, text }) if *last == index => text.push_str(part),
            _ => self.list.push(Piece::Arguments { index, text: part.to_owned() }),
        }
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.list.push(piece);
    }
}

/// Appends `more` to `pieces`, merging where one continues another.
pub fn append(pieces: &mut Vec<Piece>, more: &[Piece]) {
    for piece in more {
        match (pieces.last_mut(), piece) {
            (Some(Piece::Reasoning(text)), Piece::Reasoning(next))
            | (Some(Piece::Content(text)), Piece::Content(next)) => text.push_str(next),
            (
                Some(Piece::Arguments { index: last, text }),
                Piece::Arguments { index, text: next },
            ) if last == index => text.push_str(next),
            _ => pieces.push(piece.clone()),
        }
    }
}
