//! [`KeyNames`]: the keys of Redis.
//!
//! The key of an event is `PREFIX:NAMESPACE:ID`. In the namespace, `%`, `{` and `:` are percent-escaped, so
//! the second `:` ends it. In the id, `%` and `{` are: in a cluster, a part in braces would choose the slot, and
//! so let the sender of the event choose the server. A namespace is never empty: `PREFIX::` begins the names
//! that no event has.

use std::borrow::Cow;

use crate::key::DedupKey;

/// The names of the keys with one prefix.
#[derive(Debug)]
pub(super) struct KeyNames {
    /// With its colon.
    prefix: String,
}

impl KeyNames {
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: format!("{prefix}:") }
    }

    /// Returns the key of Redis for an event.
    pub(super) fn name(&self, key: &DedupKey) -> Vec<u8> {
        let (namespace, id) = (escaped_namespace(key.namespace()), escaped(key.id()));
        [&self.prefix, &*namespace, ":", &*id].concat().into_bytes()
    }

    /// Returns the event's key; `None` for another key of Redis.
    pub(super) fn key(&self, name: &[u8]) -> Option<DedupKey> {
        let name = std::str::from_utf8(name).ok()?.strip_prefix(&self.prefix)?;
        let (namespace, id) = name.split_once(':')?;
        let key = DedupKey::new(&unescaped(namespace), &unescaped(id)).ok()?;
        // Another program may have written a name that this one would not write.
        (self.name(&key).strip_prefix(self.prefix.as_bytes()) == Some(name.as_bytes()))
            .then_some(key)
    }

    /// Returns the glob pattern of the keys of one namespace, or of all.
    pub(super) fn pattern(&self, namespace: Option<&str>) -> String {
        let mut start = self.prefix.clone();
        if let Some(namespace) = namespace {
            start.push_str(&escaped_namespace(namespace));
            start.push(':');
        }
        let mut pattern = String::with_capacity(start.len() + 1);
        for part in start.chars() {
            if matches!(part, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(part);
        }
        pattern.push('*');
        pattern
    }
}

fn escaped(text: &str) -> Cow<'_, str> {
    if text.contains(['%', '{']) {
        text.replace('%', "%25").replace('{', "%7B").into()
    } else {
        text.into()
    }
}

fn escaped_namespace(namespace: &str) -> String {
    escaped(namespace).replace(':', "%3A")
}

fn unescaped(text: &str) -> String {
    text.replace("%3A", ":").replace("%7B", "{").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_key_is_read_again() {
        let names = KeyNames::new("dedup");
        let key = |namespace, id| DedupKey::new(namespace, id).unwrap();
        assert_eq!(names.name(&key("github", "a:b")), b"dedup:github:a:b");
        assert_eq!(names.name(&key("a:b%3A", "%:{x}")), b"dedup:a%3Ab%253A:%25:%7Bx}");
        for namespace in ["a", ":", "%", "%3A", "%253A", "{", "%7B", "*[?]\\^-", "\u{10FFFF}"] {
            for id in ["a", ":", "%3A", ":a:", "{a}", "%7B", " ", "\n"] {
                let key = key(namespace, id);
                assert_eq!(names.key(&names.name(&key)), Some(key));
            }
        }
        let long = format!("dedup:a:{}", "x".repeat(256));
        let foreign =
            ["dedup::0", "dedup:a:%3A", "dedup:", "dedup:a", "dedup:a:", "other:a:b", "a%3a:b"];
        for name in foreign.into_iter().chain([&*long, "dedup:a%:b", "dedup:a:b\0"]) {
            assert_eq!(names.key(name.as_bytes()), None, "{name}");
        }
        assert_eq!(names.key(b"dedup:a:\xff"), None);
    }

    #[test]
    fn pattern_matches_its_prefix_only() {
        let names = KeyNames::new("a-b");
        assert_eq!(names.pattern(None), r"a\-b:*");
        assert_eq!(names.pattern(Some("x*[:]\\")), r"a\-b:x\*\[%3A\]\\:*");
    }
}
