"""HTTP servers: sockets bound in advance, connections and WebSockets with time limits."""
