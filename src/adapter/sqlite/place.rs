//! [`Place`]: a place in the order of the primary key, which is the physical order of the table.

use super::super::inspection::Cursor;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The place before the key of this name, whether the key exists or not. The default is before all keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) namespace: String,
    pub(super) id: String,
}

/// Where a round of a purge stands.
#[derive(Clone)]
pub(super) struct Walk {
    pub(super) at: Place,
    pub(super) begun_at: Place,
    /// Whether the round has reached the end of the table, and goes on from its beginning.
    pub(super) has_wrapped: bool,
}

impl Place {
    /// Returns the place after all keys. A namespace has at most 64 bytes, so none is greater.
    pub(super) fn end() -> Self {
        Self { namespace: char::MAX.to_string().repeat(17), id: String::new() }
    }

    pub(super) fn before_namespace(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), id: String::new() }
    }

    /// No namespace holds a NUL, so none lies between.
    pub(super) fn after_namespace(namespace: &str) -> Self {
        Self { namespace: format!("{namespace}\0"), id: String::new() }
    }

    /// Returns the place after all keys of this namespace whose ids begin with this prefix.
    pub(super) fn after_ids(namespace: &str, prefix: &str) -> Self {
        match after_prefix(prefix) {
            Some(id) => Self { namespace: namespace.to_owned(), id },
            None => Self::after_namespace(namespace),
        }
    }

    /// Returns the cursor of this place: its names as JSON, which escapes whatever they hold.
    pub(super) fn cursor(&self) -> Cursor {
        // Strings always serialize.
        Cursor::new(serde_json::to_string(&(&self.namespace, &self.id)).unwrap_or_default())
    }

    /// Reads a cursor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] for a text that [`cursor`](Self::cursor) does not make of a key.
    pub(super) fn read(cursor: &Cursor) -> Result<Self, Error> {
        let names = serde_json::from_str::<(String, String)>(cursor.as_str()).ok();
        let place = names.map(|(namespace, id)| Self { namespace, id });
        let is_own = |place: &Self| {
            place.cursor() == *cursor
                && DedupKey::new(&place.namespace, &place.id).is_ok_and(|key| key.id() == place.id)
        };
        place.filter(is_own).ok_or_else(|| {
            Error::new(ErrorKind::Refused, "listing keys: the cursor is not one of this store")
        })
    }
}

/// Returns the least text that is greater than every text with this prefix. `None` if there is none.
fn after_prefix(prefix: &str) -> Option<String> {
    let mut text = prefix.to_owned();
    while let Some(last) = text.pop() {
        // UTF-8 sorts as code points do. The step skips the surrogates.
        if let Some(next) = (last..=char::MAX).nth(1) {
            text.push(next);
            return Some(text);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_after_a_prefix_follows_every_text_with_it() {
        let max = char::MAX.to_string();
        assert_eq!(after_prefix("ab").as_deref(), Some("ac"));
        assert_eq!(after_prefix("a\u{d7ff}").as_deref(), Some("a\u{e000}"));
        assert_eq!(after_prefix(&format!("a{max}{max}")).as_deref(), Some("b"));
        assert_eq!(after_prefix(&max), None);
        assert_eq!(after_prefix(""), None);
        assert_eq!(Place::after_ids("a", &max), Place::after_namespace("a"));
        assert_eq!(Place::after_ids("a", ""), Place::after_namespace("a"));
        assert!(Place::after_namespace("a") < Place::before_namespace("a "));
        let last = DedupKey::new(&char::MAX.to_string().repeat(16), &max).unwrap();
        assert!(Place::end().namespace.as_str() > last.namespace());
    }

    #[test]
    fn cursor_is_read_only_as_it_was_written() {
        for (namespace, id) in [("a", "b"), ("a\"", "\\"), ("\u{10ffff}", "\n\u{7f}"), ("[", "]")] {
            let place = Place { namespace: namespace.to_owned(), id: id.to_owned() };
            assert_eq!(Place::read(&place.cursor()).unwrap(), place);
        }
        let long = format!("[\"a\",\"{}\"]", "x".repeat(256));
        let foreign = [
            "",
            "0",
            "1:2",
            "null",
            "[]",
            "{}",
            "[\"a\"]",
            "[\"a\",\"\"]",
            "[\"\",\"a\"]",
            "[\"a\",\"b\",\"c\"]",
            "[\"a\", \"b\"]",
            "[\"a\",\"\\u0062\"]",
            "[\"a\",\"\\u0000\"]",
            "[\"a\\nb\",\"c\"]",
            &long,
        ];
        for text in foreign {
            let refused = Place::read(&Cursor::new(text)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused, "{text}");
        }
    }
}
