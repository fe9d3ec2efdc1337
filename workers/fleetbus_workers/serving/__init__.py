"""HTTP served to others: ports that are bound first, connections and WebSockets that cannot be held for ever."""
