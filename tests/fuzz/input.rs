//! [`Input`]: reads choices, texts and bytes from the input of a target.

/// The bytes of an input that are not read yet.
pub(crate) struct Input<'i>(pub(crate) &'i [u8]);

impl<'i> Input<'i> {
    /// Returns the next byte; 0 at the end.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *byte
    }

    /// Returns one of these by the next byte.
    pub(crate) fn pick<'t, T>(&mut self, these: &'t [T]) -> &'t T {
        &these[usize::from(self.byte()) % these.len()]
    }

    /// Returns the bytes up to the next byte 0xFE, which is in no UTF-8 text, or to the end.
    pub(crate) fn bytes(&mut self) -> &'i [u8] {
        let end = self.0.iter().position(|byte| *byte == 0xFE).unwrap_or(self.0.len());
        let (bytes, rest) = self.0.split_at(end);
        self.0 = rest.get(1..).unwrap_or_default();
        bytes
    }

    /// As [`bytes`](Self::bytes), without what is no UTF-8.
    pub(crate) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.bytes()).replace('\u{fffd}', "")
    }
}
