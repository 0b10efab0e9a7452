"""What the pages for browsers share: headers, fixed files, and strangers' words made fit."""
