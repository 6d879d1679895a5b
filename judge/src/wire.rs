//! [`Connection`]: a request over a socket of our own, whole or in parts, and its [`Answer`].

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::target::Target;

/// How long a receiver may take to read a part of a request, and to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The largest answer, in bytes.
const LARGEST: u64 = 64 << 20;
const MOST_HEADERS: usize = 1024;

/// The answer to a request, or why there is none.
#[derive(Debug)]
pub(crate) struct Answer(pub(crate) Result<(StatusCode, Vec<u8>), String>);

impl Answer {
    pub(crate) fn is_success(&self) -> bool {
        self.status().is_some_and(|status| status.is_success())
    }

    pub(crate) fn status(&self) -> Option<StatusCode> {
        self.0.as_ref().ok().map(|(status, _)| *status)
    }

    /// Returns `true` if the receiver may answer a repetition otherwise.
    pub(crate) fn is_momentary(&self) -> bool {
        let status = self.status().map(|status| status.as_u16());
        matches!(status, None | Some(425 | 429 | 503))
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok((status, _)) => status.as_u16().fmt(f),
            Err(why) => f.write_str(why),
        }
    }
}

/// A connection for one request, or why there is none.
#[derive(Debug)]
pub(crate) struct Connection(io::Result<TcpStream>);

impl Connection {
    /// Connects, and writes the first part of a request.
    pub(crate) async fn open(target: &Target, part: &[u8]) -> Self {
        let mut opened = Self(target.connect().await);
        opened.write(part).await;
        opened
    }

    pub(crate) async fn write(&mut self, part: &[u8]) {
        if let Ok(stream) = &mut self.0 {
            // A receiver that refuses a request may close before its end: its answer is there.
            let _ = timeout(ANSWER, stream.write_all(part)).await;
        }
    }

    /// Ends the sending direction.
    pub(crate) async fn end(&mut self) {
        if let Ok(stream) = &mut self.0 {
            let _ = stream.shutdown().await;
        }
    }

    /// Closes the connection by a reset.
    pub(crate) fn reset(self) {
        let _ = self.0.and_then(|stream| stream.set_zero_linger());
    }

    pub(crate) async fn answer(self) -> Answer {
        let answer = async { read(self.0?).await };
        Answer(match timeout(ANSWER, answer).await {
            Ok(answer) => answer.map_err(|error| format!("no answer ({error})")),
            Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs())),
        })
    }
}

/// The headers of a FILE that the judge replaces by its own, or leaves out.
pub(crate) const OWN_HEADERS: [http::HeaderName; 5] = [
    header::HOST,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::EXPECT,
];

/// Returns the bytes of a head, with this header of the length.
fn with_length(target: &Target, request: &Request<Bytes>, length: &str) -> Vec<u8> {
    let path = request.uri().path_and_query().map_or("/", |it| it.as_str());
    let mut head = format!("{} {path} HTTP/1.1\r\n", request.method()).into_bytes();
    let agent = ("user-agent", concat!("tower-dedup-judge/", env!("CARGO_PKG_VERSION")));
    let agent = (!request.headers().contains_key(agent.0)).then_some(agent);
    let ours = [("host", target.authority.as_str()), ("connection", "close")];
    for (name, value) in ours.into_iter().chain(agent) {
        head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    for (name, value) in request.headers() {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(format!("{length}\r\n\r\n").as_bytes());
    head
}

/// Returns the head alone. It promises the body.
pub(crate) fn head(target: &Target, request: &Request<Bytes>) -> Vec<u8> {
    with_length(target, request, &format!("content-length: {}", request.body().len()))
}

/// Returns the bytes of a whole request.
pub(crate) fn whole(target: &Target, request: &Request<Bytes>) -> Vec<u8> {
    [&head(target, request)[..], request.body()].concat()
}

/// The end of a chunked body.
pub(crate) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Returns a request with a chunked body that ends by these bytes.
pub(crate) fn chunked(target: &Target, request: &Request<Bytes>, end: &[u8]) -> Vec<u8> {
    let mut bytes = with_length(target, request, "transfer-encoding: chunked");
    let body = request.body();
    for data in body.chunks(body.len().div_ceil(3).max(1)) {
        bytes.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(b"\r\n");
    }
    [&bytes, end].concat()
}

/// Reads an answer to its end.
async fn read(stream: TcpStream) -> io::Result<(StatusCode, Vec<u8>)> {
    let (mut stream, mut input) = (stream.take(LARGEST), Vec::new());
    loop {
        let is_closed = stream.read_buf(&mut input).await.unwrap_or(0) == 0;
        match parse(&input, is_closed)? {
            Some(answer) => return Ok(answer),
            None if is_closed => return Err(io::Error::other("the connection was closed")),
            None => {}
        }
    }
}

/// Returns the answer once it is whole. Passes over 1xx.
fn parse(mut input: &[u8], is_closed: bool) -> io::Result<Option<(StatusCode, Vec<u8>)>> {
    let mut config = httparse::ParserConfig::default();
    config.ignore_invalid_headers_in_responses(true);
    loop {
        let mut headers = vec![httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let parsed = config.parse_response(&mut head, input).map_err(io::Error::other)?;
        let httparse::Status::Complete(length) = parsed else { return Ok(None) };
        let status = head.code.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.ok_or_else(|| io::Error::other("no status"))?;
        input = &input[length..];
        if status.is_informational() {
            continue;
        }
        let value = |name: &str| {
            let found = head.headers.iter().find(|it| it.name.eq_ignore_ascii_case(name))?;
            str::from_utf8(found.value).ok()
        };
        let length = value("content-length").and_then(|value| value.parse().ok());
        let body = match length {
            _ if [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status) => {
                Some(Vec::new())
            }
            _ if value("transfer-encoding").is_some() => unchunked(input)?,
            Some(length) => input.get(..length).map(<[u8]>::to_vec),
            None => is_closed.then(|| input.to_vec()),
        };
        return Ok(body.map(|body| (status, body)));
    }
}

/// Returns the data of a chunked body, once it is complete.
fn unchunked(mut input: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        let parsed = httparse::parse_chunk_size(input);
        let parsed = parsed.map_err(|_| io::Error::other("a chunk is malformed"))?;
        let httparse::Status::Complete((start, size)) = parsed else { return Ok(None) };
        if size == 0 {
            return Ok(Some(body));
        }
        let end = usize::try_from(size).ok().and_then(|size| start.checked_add(size));
        let Some((data, rest)) = end.and_then(|end| input.split_at_checked(end)) else {
            return Ok(None);
        };
        let Some(rest) = rest.get(2..) else { return Ok(None) };
        body.extend_from_slice(&data[start..]);
        input = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_ends_as_its_head_says() {
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(500));
        let chunked = "HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n";
        // What has arrived, and the answer; whether it ends with the connection.
        let cases = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokMORE", Some((200, "ok")), false),
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nok", None, false),
            ("HTTP/1.0 500 Oops\r\n\r\nto the end", Some((500, "to the end")), true),
            (&many, Some((200, "")), true),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", Some((204, "")), false),
            ("HTTP/1.1 103 Early\r\nlink: </a>\r\n\r\n", None, false),
            (
                "HTTP/1.1 200 OK\r\nno header : 1\r\ncontent-length: 0\r\n\r\n",
                Some((200, "")),
                false,
            ),
            (&format!("{chunked}2;x\r\nab\r\n1\r\nc\r\n0\r\n\r\n"), Some((201, "abc")), false),
            (&format!("{chunked}2\r\nab\r\n"), None, false),
            (&format!("{chunked}9\r\nab\r\n"), None, false),
            ("", None, false),
        ];
        for (input, expected, ends_with_connection) in cases {
            let read = |is_closed| {
                let answer = parse(input.as_bytes(), is_closed).unwrap();
                answer.map(|(status, body)| (status.as_u16(), String::from_utf8(body).unwrap()))
            };
            let expected = expected.map(|(code, body)| (code, body.to_owned()));
            assert_eq!(read(false), expected.clone().filter(|_| !ends_with_connection), "{input}");
            assert_eq!(read(true), expected, "{input}");
        }
        assert!(parse(b"nonsense\r\n\r\n", true).is_err());
    }
}
