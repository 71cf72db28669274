//! What parsers make of a model's output: reasoning, content and tool calls, piece by piece.

/// One piece of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
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
pub struct PieceList {
    pieces: Vec<Placed>,
    text: String,
}

/// A piece whose text begins at a byte of the buffer, and ends where that of the next one begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    kind: Kind,
    start: usize,
}

/// A piece without its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Call { index: u32, from: usize },
    Arguments { index: u32 },
    End { index: u32 },
    Broken { index: u32, to: usize },
}

impl PieceList {
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
    pub fn iter(&self) -> impl Iterator<Item = Piece<'_>> {
        let ends = self.pieces.iter().skip(1).map(|next| next.start);
        let ends = ends.chain([self.text.len()]);
        self.pieces.iter().zip(ends).map(|(piece, end)| piece.read(&self.text[piece.start..end]))
    }

    /// Appends `more`, merging where one continues another.
    pub fn append(&mut self, more: &Self) {
        for piece in more.iter() {
            let (kind, text) = piece.parts();
            self.open(kind);
            self.text.push_str(text);
        }
    }

    /// Goes on with the last piece if it is of this kind, else begins one.
    #[inline]
    fn open(&mut self, kind: Kind) {
        let goes_on = matches!(kind, Kind::Reasoning | Kind::Content | Kind::Arguments { .. })
            && self.pieces.last().is_some_and(|last| last.kind == kind);
        if !goes_on {
            self.pieces.push(Placed { kind, start: self.text.len() });
        }
    }
}

impl Placed {
    fn read(self, text: &str) -> Piece<'_> {
        match self.kind {
            Kind::Reasoning => Piece::Reasoning(text),
            Kind::Content => Piece::Content(text),
            Kind::Call { index, from } => Piece::Call { index, name: text, from },
            Kind::Arguments { index } => Piece::Arguments { index, text },
            Kind::End { index } => Piece::End { index },
            Kind::Broken { index, to } => Piece::Broken { index, to },
        }
    }
}

impl<'a> Piece<'a> {
    fn parts(self) -> (Kind, &'a str) {
        match self {
            Self::Reasoning(text) => (Kind::Reasoning, text),
            Self::Content(text) => (Kind::Content, text),
            Self::Call { index, name, from } => (Kind::Call { index, from }, name),
            Self::Arguments { index, text } => (Kind::Arguments { index }, text),
            Self::End { index } => (Kind::End { index }, ""),
            Self::Broken { index, to } => (Kind::Broken { index, to }, ""),
        }
    }
}

/// Where the pieces of one push go, and where in the output the parser stands.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    list: &'a mut PieceList,
    /// Bytes of the output up to and including the character being read.
    pub(super) at: usize,
}

impl<'a> Pieces<'a> {
    #[inline]
    pub(super) fn new(list: &'a mut PieceList, at: usize) -> Self {
        Self { list, at }
    }

    #[inline]
    pub(super) fn reasoning(&mut self, c: char) {
        self.list.open(Kind::Reasoning);
        self.list.text.push(c);
    }

    #[inline]
    pub(super) fn content(&mut self, c: char) {
        self.list.open(Kind::Content);
        self.list.text.push(c);
    }

    /// Content that nobody looks into.
    pub(super) fn text(&mut self, more: &str) {
        self.add(Kind::Content, more);
    }

    #[inline]
    pub(super) fn argument(&mut self, index: u32, c: char) {
        self.list.open(Kind::Arguments { index });
        self.list.text.push(c);
    }

    pub(super) fn arguments(&mut self, index: u32, part: &str) {
        self.add(Kind::Arguments { index }, part);
    }

    fn add(&mut self, kind: Kind, text: &str) {
        if !text.is_empty() {
            self.list.open(kind);
            self.list.text.push_str(text);
        }
    }

    pub(super) fn call(&mut self, index: u32, name: &str, from: usize) {
        self.list.open(Kind::Call { index, from });
        self.list.text.push_str(name);
    }

    pub(super) fn end(&mut self, index: u32) {
        self.list.open(Kind::End { index });
    }

    pub(super) fn broken(&mut self, index: u32, to: usize) {
        self.list.open(Kind::Broken { index, to });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_as_they_were_written_and_merged() {
        let mut list = PieceList::default();
        let mut out = Pieces::new(&mut list, 9);
        out.text("");
        out.content('a');
        out.text("é");
        out.call(0, "f", 3);
        out.end(0);
        out.call(1, "", 7);
        out.arguments(1, "{");
        out.argument(1, '}');
        out.broken(1, 9);
        out.reasoning('z');
        let all = [
            Piece::Content("aé"),
            Piece::Call { index: 0, name: "f", from: 3 },
            Piece::End { index: 0 },
            Piece::Call { index: 1, name: "", from: 7 },
            Piece::Arguments { index: 1, text: "{}" },
            Piece::Broken { index: 1, to: 9 },
            Piece::Reasoning("z"),
        ];
        assert!(list.iter().eq(all) && list.len() == all.len());

        let mut more = PieceList::default();
        Pieces::new(&mut more, 0).reasoning('y');
        Pieces::new(&mut more, 0).text("b");
        list.append(&more);
        assert!(list.iter().skip(6).eq([Piece::Reasoning("zy"), Piece::Content("b")]));
        list.clear();
        assert!(list.is_empty() && list.iter().next().is_none());
    }
}
