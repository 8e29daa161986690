"""From fragments to a plan whose every slot has a layout."""
