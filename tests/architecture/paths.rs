//! Reads the paths of a file from its tokens.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path in a file, from the root of the crate.
pub(crate) struct Named {
    pub(crate) line: usize,
    pub(crate) segments: Vec<String>,
    /// The name that the path has here, if it is part of a `use`.
    pub(crate) name: Option<String>,
}

/// The paths in these tokens of `module`: after `crate::`, `self::`, `super::`, or the name of a
/// child module.
pub(crate) fn paths(
    module: &[String],
    is_child: &dyn Fn(&str) -> bool,
    tokens: TokenStream,
    found: &mut Vec<Named>,
) {
    let tokens = without_tests(tokens);
    let (mut at, mut import) = (0, false);
    while let Some(token) = tokens.get(at) {
        match token {
            // `pub(in crate::key)` uses nothing.
            TokenTree::Group(_) if at > 0 && is_ident(&tokens[at - 1], "pub") => {}
            TokenTree::Group(group) => paths(module, is_child, group.stream(), found),
            TokenTree::Punct(punct) if punct.as_char() == ';' => import = false,
            TokenTree::Ident(ident) if ident == "use" => import = true,
            TokenTree::Ident(ident) if ident == "mod" => {
                // An inner module is one step further from the root.
                if let [_, TokenTree::Ident(name), TokenTree::Group(group), ..] = &tokens[at..] {
                    let inner = [module, &[name.to_string()]].concat();
                    paths(&inner, &|_| false, group.stream(), found);
                    at += 2;
                }
            }
            TokenTree::Ident(ident) if followed_by_path(&tokens, at) && !in_path(&tokens, at) => {
                let name = ident.to_string();
                let (base, after) = match name.as_str() {
                    // `$crate` is for users, who see what `lib` exports.
                    "crate" if !is_punct_before(&tokens, at, '$') => (vec![], at + 1),
                    "self" => (module.to_vec(), at + 1),
                    "super" => {
                        let mut base = module.to_vec();
                        base.pop();
                        (base, at + 1)
                    }
                    name if is_child(name) => (module.to_vec(), at),
                    _ => {
                        at += 1;
                        continue;
                    }
                };
                let line = ident.span().start().line;
                let after = if after == at { at } else { after + 2 };
                expand(&tokens[after..], base, line, import, found);
                at = end_of_path(&tokens, at);
            }
            _ => {}
        }
        at += 1;
    }
}

/// The continuation of a path: `key::DedupKey`, `{error::Error, key}`, `super::gate`.
fn expand(
    tokens: &[TokenTree],
    mut base: Vec<String>,
    line: usize,
    import: bool,
    found: &mut Vec<Named>,
) {
    match tokens.first() {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let inner: Vec<_> = group.stream().into_iter().collect();
            for part in inner.split(|token| is_punct(token, ',')).filter(|part| !part.is_empty()) {
                let line = part[0].span().start().line;
                expand(part, base.clone(), line, import, found);
            }
        }
        Some(TokenTree::Ident(ident)) => {
            match ident.to_string().as_str() {
                "super" => drop(base.pop()),
                "self" => {}
                name => base.push(name.to_owned()),
            }
            if followed_by_path(tokens, 0) {
                return expand(&tokens[3..], base, line, import, found);
            }
            let name = match tokens {
                [_, word, alias, ..] if is_ident(word, "as") => Some(alias.to_string()),
                _ => base.last().cloned(),
            };
            found.push(Named { line, segments: base, name: name.filter(|_| import) });
        }
        Some(token) if is_punct(token, '*') => {
            base.push("*".to_owned());
            found.push(Named { line, segments: base, name: None });
        }
        // `Type::<T>`: the path ends here.
        _ => found.push(Named { line, segments: base, name: None }),
    }
}

/// The last token of the path that begins at `at`.
fn end_of_path(tokens: &[TokenTree], mut at: usize) -> usize {
    while followed_by_path(tokens, at) {
        match tokens.get(at + 3) {
            Some(TokenTree::Ident(_)) => at += 3,
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                return at + 3;
            }
            _ => return at + 2,
        }
    }
    at
}

fn followed_by_path(tokens: &[TokenTree], at: usize) -> bool {
    matches!(&tokens[at + 1..], [one, two, ..] if is_punct(one, ':') && is_punct(two, ':'))
}

/// Returns `true` if the token continues a path: `::name`.
fn in_path(tokens: &[TokenTree], at: usize) -> bool {
    at >= 2 && is_punct(&tokens[at - 1], ':') && is_punct(&tokens[at - 2], ':')
}

fn is_punct_before(tokens: &[TokenTree], at: usize, punct: char) -> bool {
    at > 0 && is_punct(&tokens[at - 1], punct)
}

fn is_punct(token: &TokenTree, punct: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == punct)
}

fn is_ident(token: &TokenTree, name: &str) -> bool {
    matches!(token, TokenTree::Ident(found) if found == name)
}

/// The lines that name a crate outside of tests.
pub(crate) fn lines_with(name: &str, tokens: TokenStream) -> Vec<usize> {
    let mut lines = Vec::new();
    for token in without_tests(tokens) {
        match token {
            TokenTree::Group(group) => lines.extend(lines_with(name, group.stream())),
            TokenTree::Ident(ident) if ident == name => lines.push(ident.span().start().line),
            _ => {}
        }
    }
    lines
}

/// Returns the tokens without the items under `#[cfg(test)]`: each ends with its block or semicolon.
fn without_tests(tokens: TokenStream) -> Vec<TokenTree> {
    split_tests(tokens).0
}

/// The modules that are declared as `#[cfg(test)] mod name;`.
pub(crate) fn test_modules(tokens: TokenStream) -> Vec<String> {
    let (_, tests) = split_tests(tokens);
    let declared = tests.iter().filter_map(|item| match &item[..] {
        [.., module, TokenTree::Ident(name), end] if is_ident(module, "mod") => {
            is_punct(end, ';').then(|| name.to_string())
        }
        _ => None,
    });
    declared.collect()
}

/// The tokens that ship, and the items under `#[cfg(test)]`.
fn split_tests(tokens: TokenStream) -> (Vec<TokenTree>, Vec<Vec<TokenTree>>) {
    let (mut shipped, mut tests) = (Vec::new(), Vec::new());
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let is_test = is_punct(&token, '#') && tokens.peek().is_some_and(is_cfg_test);
        if !is_test {
            shipped.push(token);
            continue;
        }
        let mut item = Vec::new();
        for token in tokens.by_ref() {
            let ends = match &token {
                TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                token => is_punct(token, ';'),
            };
            item.push(token);
            if ends {
                break;
            }
        }
        tests.push(item);
    }
    (shipped, tests)
}

fn is_cfg_test(token: &TokenTree) -> bool {
    matches!(token.to_string().as_str(), "[cfg (test)]" | "[cfg(test)]")
}
