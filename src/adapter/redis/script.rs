//! [`Script`]: a Lua script, and [`ScriptCall`]: one call of it over one key.
//!
//! A script is sent as it stands in its file, without lines of comment, between the prelude and the
//! epilogue.

use std::sync::LazyLock;

use redis::{Arg, Cmd, ToRedisArgs};

/// What most scripts begin with: it reads the row of the key.
const PRELUDE: &str = include_str!("lua/prelude.lua");

/// What most scripts end with: it writes the row.
const EPILOGUE: &str = include_str!("lua/epilogue.lua");

/// Scripts that need little memory, or free it soon, work at `maxmemory`: a renewal or a completion that is
/// refused would lead to a second run.
const ALLOW_OOM: &str = " flags=allow-oom";

/// Declares scripts that write a row. Each is named after its file in the folder `lua`.
macro_rules! scripts {
    ($($name:ident = $file:literal, $flags:expr;)+) => {
        $(pub(super) static $name: LazyLock<Script> = LazyLock::new(|| {
            Script::new(&[PRELUDE, include_str!($file), EPILOGUE].map(code).join("\n"), $flags)
        });)+

        #[cfg(test)]
        const ALL: &[(&str, &LazyLock<Script>)] = &[
            $(($file, &$name),)+
            ("lua/get.lua", &GET),
            ("lua/canary.lua", &CANARY),
            ("lua/push_loss.lua", &PUSH_LOSS),
        ];
    };
}

scripts! {
    CLAIM = "lua/claim.lua", "";
    RENEW = "lua/renew.lua", ALLOW_OOM;
    COMPLETE = "lua/complete.lua", ALLOW_OOM;
    RELEASE = "lua/release.lua", ALLOW_OOM;
    FORGET = "lua/forget.lua", ALLOW_OOM;
}

/// Reads a key.
pub(super) static GET: LazyLock<Script> =
    LazyLock::new(|| Script::new(&code(include_str!("lua/get.lua")), " flags=no-writes"));

/// Reads a canary, and writes its next number.
pub(super) static CANARY: LazyLock<Script> =
    LazyLock::new(|| Script::new(&code(include_str!("lua/canary.lua")), ALLOW_OOM));

/// Adds a record to the list of losses.
pub(super) static PUSH_LOSS: LazyLock<Script> =
    LazyLock::new(|| Script::new(&code(include_str!("lua/push_loss.lua")), ALLOW_OOM));

/// Returns a file without lines of comment and without empty lines.
fn code(file: &str) -> String {
    let is_code = |line: &&str| !line.is_empty() && !line.trim_start().starts_with("--");
    file.lines().filter(is_code).collect::<Vec<_>>().join("\n")
}

/// A Lua script of this crate. Every script reads and writes one key.
#[derive(Debug)]
pub(super) struct Script {
    /// Begins with `#!lua`, and with the script's flags. Needs a server from 7.0 on. A replica, and a
    /// server at `maxmemory`, refuse the whole script before it begins, unless a flag allows it.
    flagged: Text,
    /// Without that line, for servers before 7.0. These refuse the first command that writes, which is
    /// the only one of each script, so nothing is stored either. At `maxmemory` they refuse completions
    /// and releases too.
    plain: Text,
}

#[derive(Debug)]
struct Text {
    lua: String,
    sha1: String,
}

impl Text {
    fn new(lua: String) -> Self {
        let sha1 = redis::Script::new(&lua).get_hash().to_owned();
        Self { lua, sha1 }
    }
}

impl Script {
    /// `flags` are the script's flags: `""`, or `" flags=allow-oom"`.
    pub(super) fn new(lua: &str, flags: &str) -> Self {
        let flagged = Text::new(format!("#!lua{flags}\n{lua}"));
        Self { flagged, plain: Text::new(lua.to_owned()) }
    }
}

/// How a call is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// The server knows flags of scripts: it is of version 7.0 or later.
    pub(super) knows_flags: bool,
    /// The script writes the value also if it changes nothing, unless it refuses the call. `WAIT` waits
    /// for writes of its own connection only: the first write may have been on another one.
    pub(super) force_write: bool,
}

/// One call of a script. Repeated as it is, it has the same effect.
#[derive(Debug, Clone)]
pub(super) struct ScriptCall {
    script: &'static Script,
    key: Vec<u8>,
    args: Cmd,
}

impl ScriptCall {
    /// `key` is the key of Redis.
    pub(super) fn new(script: &'static Script, key: Vec<u8>) -> Self {
        Self { script, key, args: Cmd::with_capacity(8, 128) }
    }

    /// Adds an argument: the script's `ARGV[2]` and so on. `ARGV[1]` is `1` for
    /// [`force_write`](Form::force_write), else `0`.
    pub(super) fn arg(mut self, arg: impl ToRedisArgs) -> Self {
        self.args.arg(arg);
        self
    }

    /// Returns the key of Redis that the script reads and writes.
    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the call by the script's hash.
    pub(super) fn by_hash(&self, form: Form) -> Cmd {
        self.command("EVALSHA", &self.text(form).sha1, form)
    }

    /// Returns the call with the script's text, for a server that does not know the hash.
    pub(super) fn by_text(&self, form: Form) -> Cmd {
        self.command("EVAL", &self.text(form).lua, form)
    }

    fn text(&self, form: Form) -> &'static Text {
        if form.knows_flags { &self.script.flagged } else { &self.script.plain }
    }

    fn command(&self, name: &str, script: &str, form: Form) -> Cmd {
        let mut command = Cmd::with_capacity(16, script.len() + self.key.len() + 128);
        command.arg(name).arg(script).arg(1).arg(&self.key).arg(u8::from(form.force_write));
        for arg in self.args.args_iter() {
            if let Arg::Simple(arg) = arg {
                command.arg(arg);
            }
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `UPDATE_GOLDEN=1 cargo test --lib --all-features golden` rewrites the file.
    #[test]
    fn scripts_are_those_of_the_golden_file() {
        const FILE: &str = "src/adapter/redis/lua/golden.txt";
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
        let texts = ALL.iter().map(|(name, script)| format!("-- {name}\n{}\n", script.flagged.lua));
        let found = texts.collect::<Vec<_>>().join("\n");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &found).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            golden == found,
            "the scripts differ from {FILE}; after a review, run `UPDATE_GOLDEN=1 cargo test golden`"
        );
    }

    #[test]
    fn plain_form_differs_by_the_first_line_only() {
        for (name, script) in ALL {
            let (first, rest) = script.flagged.lua.split_once('\n').unwrap();
            assert!(first.starts_with("#!lua") && rest == script.plain.lua, "{name}");
            assert_ne!(script.flagged.sha1, script.plain.sha1);
        }
    }
}
